"""The table of guards in docs/how-it-works.md is that of the code."""

import importlib
import re
from pathlib import Path

import torchgpipe.task.guards

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/how-it-works.md").read_text()
ROWS = re.findall(r"^\| `(\w+)\.py`: `(\w+)` \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
# What guards have in common, or one of them needs.
BESIDE = {"__init__", "in_place", "contents", "seeded", "stage_guards"}


def test_each_guard_has_a_row() -> None:
    files = {path.stem for path in Path(torchgpipe.task.guards.__file__ or "").parent.glob("*.py")}
    assert {file for file, *_ in ROWS} == files - BESIDE


def test_each_guard_has_the_moments_of_its_row() -> None:
    for file, name, _, moments in ROWS:
        guard = getattr(importlib.import_module(f"torchgpipe.task.guards.{file}"), name)
        named = re.findall(r"`(\w+)`", moments)
        assert (
            named
            and [moment for moment in named if not callable(getattr(guard, moment, None))] == []
        )
