"""The table of guards in docs/how-it-works.md has the guards and moments that the code has."""

import importlib
import re
from pathlib import Path

import torchgpipe.task.guards

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/how-it-works.md").read_text()
ROWS = re.findall(r"^\| `(\w+)\.py`: `(\w+)` \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
# Files without a guard: what several guards have in common, or one of them needs.
BESIDE = {"__init__", "in_place", "contents", "seeded", "stage_guards"}


def test_each_guard_has_a_row() -> None:
    folder = Path(torchgpipe.task.guards.__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py")}
    with_rows = set()
    for file, *_ in ROWS:
        with_rows.add(file)
    assert with_rows == files - BESIDE


def test_each_guard_has_the_moments_of_its_row() -> None:
    for file, name, _, moments in ROWS:
        module = importlib.import_module(f"torchgpipe.task.guards.{file}")
        guard = getattr(module, name)
        named = re.findall(r"`(\w+)`", moments)
        assert len(named) > 0
        for moment in named:
            assert callable(getattr(guard, moment, None)), moment
