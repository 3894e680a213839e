"""Make the table of a benchmark's kept result, for a block in README.md or docs/."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path

from reproduce.error import Error
from reproduce.machine.description import ROOT

__all__ = ["BENCHMARKS", "benchmark_block"]

BENCHMARKS = ROOT / "results" / "benchmarks"
ELSEWHERE = {"regression": "benchmarks.regression"}  # what makes the table, where it is not benchmarks.NAME


def benchmark_block(page: Path, name: str, folder: Path = BENCHMARKS) -> str:
    """Return the table of the result `name`, and what it was made under; or that nothing was measured yet.

    Raises:
        Error: the result is broken, or no benchmark makes one of that name.
    """
    from benchmarks.circumstances import told

    path = folder / f"{name}.json"
    kind = name.partition("-")[0]
    if not path.exists() and (kind in ELSEWHERE or importlib.util.find_spec(f"benchmarks.{kind}") is not None):
        return "Nothing measured is committed yet.\n"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        module = ELSEWHERE.get(result["benchmark"], f"benchmarks.{result['benchmark']}")
        made = importlib.import_module(module).table(result, "pipe")
        under = told(result["circumstances"])
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise Error(f"{page}: the block from benchmarks/{name} cannot be made ({path}: {error!r})") from error
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"{made}\n\nMeasured {under}; [every sample]({link})\n\n"
