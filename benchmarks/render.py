"""Rewrite the tables that are made from records, as `python -m reproduce render` does, and those of benchmarks.

    python -m benchmarks.render            # or make results
    python -m benchmarks.render --check    # as make lint does

Benchmarks import `reproduce`, not the reverse. So they pass it the function that makes their blocks.
"""

import sys
from pathlib import Path

from benchmarks import any_model, schedules, works_with
from benchmarks.gates import machinery
from reproduce.cli.main import main
from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.records.record import FREED_MEMORY, load
from reproduce.tables.render import NOTHING, link

BENCHMARKS = ROOT / "results" / "benchmarks"
TABLES = {
    "any_model": any_model.table,
    "conformance": works_with.table,
    "machinery": machinery.table,
    "schedules": schedules.table,
}


def block(page: Path, name: str, folder: Path = BENCHMARKS) -> str:
    """Return the table of the benchmark's record `name` and a line about its run, or that there is no record yet.

    Raises:
        Error: the record is broken, or no benchmark has that name.
    """
    path = folder / f"{name}.json"
    try:
        table = TABLES[name.partition("-")[0]]
        if not path.exists():
            return NOTHING
        record = load(path)
        assert record.run is not None
        made, run = table(record, "pipe"), record.run
        machine, git = run.machine, run.git
        gpu = f"{machine.gpus[0].name}, " if machine.gpus else ""
        freed = ", freed memory kept" if run.settings.get(FREED_MEMORY) == "kept" else ""
        before = "" if run.load is None else f", load {run.load[0]:.2f} before the start"
        under = (
            f"{run.started[:10]}, torch {run.versions['torch']}, Python {run.versions['python']}, "
        )
        under += f"{gpu}{machine.cpu}, {machine.cores} cores{freed}{before}, "
        under += "no revision" if git is None else f"revision {git.name(9, ', with changes ')}"
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Error(
            f"{page}: the block from benchmarks/{name} cannot be made ({path}: {error!r})"
        ) from error
    return f"{made}\n\n{record.kind.capitalize()} {under}; [record]({link(page, path)})\n\n"


if __name__ == "__main__":
    sys.exit(main(["render", *sys.argv[1:]], block))
