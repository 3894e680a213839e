"""Rewrite the parts of the docs that are made from records and from docstrings.

    python -m benchmarks.render            # or `make results`
    python -m benchmarks.render --check    # `make lint` runs this

The command `python -m reproduce render` rewrites only the tables of experiments, because
`reproduce` must not import `benchmarks`. This program runs the same command, and passes it the
function `block`, which makes the tables of benchmarks and the text about the API.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import any_model, api, compiled, schedules, which, works_with
from benchmarks.gates import losses, machinery
from benchmarks.harness import KEPT
from benchmarks.league.table import table as league_table
from reproduce.cli.main import main
from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.records.record import FREED_MEMORY, Run, load
from reproduce.tables.render import NOTHING, link

# Blocks that are not made from a record in the folder of benchmarks.
API = "api"
LEAGUE = "league"
BENCHMARKS = ROOT / "results" / "benchmarks"
TABLES = {
    "any_model": any_model.table,
    "compiled": compiled.table,
    "conformance": works_with.table,
    "losses": losses.table,
    "machinery": machinery.table,
    "schedules": schedules.table,
    "which": which.table,
}


def block(page: Path, name: str, folder: Path = BENCHMARKS) -> str:
    """Return a benchmark's table, and a line about when and where its numbers were measured.

    Args:
        page: The page that contains the table.
        name: The name of the record's file in `folder`, without the suffix `.json`. If the file
            does not exist, the returned text says so.
        folder: The folder of the records.

    Raises:
        Error: If the record cannot be read, or if no benchmark has that name.
    """
    if name == API:
        return api.reference() + "\n\n"
    if name == LEAGUE:
        return league_table("pipe") + "\n\n"
    path = folder / f"{name}.json"
    try:
        table = TABLES[name.partition("-")[0]]
        if not path.exists():
            return NOTHING
        record = load(path)
        rendered = table(record, "pipe")
        conditions = ""
        if record.run is not None:  # a prediction does not depend on the machine
            conditions = f" on {', '.join(_conditions(record.run))}"
        if any(KEPT in note for note in record.notes):
            conditions += "; some of them were kept from earlier revisions, which the record names"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        failure = f"the block from benchmarks/{name} cannot be made ({path}: {error!r})"
        raise Error(f"{page}: {failure}") from error
    source = f"[record]({link(page, path)})"
    return f"{rendered}\n\nThe numbers of this {source} were {record.kind}{conditions}.\n\n"


def _conditions(run: Run) -> Iterator[str]:
    """Yield short texts about a run: date, versions, machine, and how busy the machine was."""
    machine, versions, load, git = run.machine, run.versions, run.load, run.git
    yield f"{run.started[:10]} with torch {versions['torch']}"
    yield f"Python {versions['python']}"
    if machine.gpus:
        first, *_ = machine.gpus
        yield first.name
    yield machine.cpu
    yield f"{machine.cores} cores"
    if run.settings.get(FREED_MEMORY) == "kept":
        yield "freed memory kept"
    if load is not None:
        last_minute, *_ = load
        yield f"a load of {last_minute:.2f} before the start"
    if git is None:
        yield "no revision"
    else:
        name = git.name(9, ", with changes ")
        yield f"revision {name}"


if __name__ == "__main__":
    sys.exit(main(["render", *sys.argv[1:]], block))
