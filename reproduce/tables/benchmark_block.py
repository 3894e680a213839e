"""Make the table of a benchmark's record, for a block in README.md or docs/."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.records.record import FREED_MEMORY, Run, load

__all__ = ["BENCHMARKS", "benchmark_block"]

BENCHMARKS = ROOT / "results" / "benchmarks"


def benchmark_block(page: Path, name: str, folder: Path = BENCHMARKS) -> str:
    """Return the table of the record `name`, such as `overlap-kept` of `benchmarks.overlap`, and what it was made
    under; or that nothing was measured yet.

    Raises:
        Error: the record is broken, or no benchmark makes one of that name.
    """
    path = folder / f"{name}.json"
    module = f"benchmarks.{name.partition('-')[0]}"
    try:
        if not path.exists() and importlib.util.find_spec(module) is not None:
            return "Nothing measured is committed yet.\n"
        record = load(path)
        assert record.run is not None
        made = importlib.import_module(module).table(record, "pipe")
        under = _circumstances(record.run)
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise Error(f"{page}: the block from benchmarks/{name} cannot be made ({path}: {error!r})") from error
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"{made}\n\nMeasured {under}; [every sample]({link})\n\n"


def _circumstances(run: Run) -> str:
    """Return in a line what a run was made under."""
    machine, git = run.machine, run.git
    gpu = f"{machine.gpus[0].name}, " if machine.gpus else ""
    freed = ", freed memory kept" if run.settings.get(FREED_MEMORY) == "kept" else ""
    load = "" if run.load is None else f", load {run.load[0]:.2f} before the start"
    revision = "no revision" if git is None else f"revision {git.revision[:9]}{', with changes' if git.dirty else ''}"
    return (
        f"{run.started[:10]}, torch {run.versions['torch']}, Python {run.versions['python']}, {gpu}{machine.cpu}, "
        f"{machine.cores} cores{freed}{load}, {revision}"
    )
