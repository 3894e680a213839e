"""Define the command `list`, which lists the experiments and says which can run here."""

import contextlib
import textwrap
from pathlib import Path

import click

from reproduce.cli.job import TIMED
from reproduce.cli.shared import command, devices, known, on, style
from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_scale, why_not
from reproduce.experiments.row import Experiment, Row, Scale
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import MEASURED, RUNS
from reproduce.records.record import ranked, readable
from reproduce.tables.layout import Column, Table, many, table
from reproduce.tables.output import Number, of_cells, written

SHOWS = 38  # width of the column "what it shows", in characters
NOTES = (
    "scale: the largest that this machine holds now",
    "minutes: of a finished run of all rows, in runs; of several, of the one that counts "
    "(docs/results.md); in brackets: in results/measured, which may have been on another machine; "
    "<: together with other experiments; ?: no such run",
    "python -m reproduce list NAME shows all rows; run --all runs all of them",
)
# A run with one of these options takes longer or shorter than a usual run.
PARTIAL = (
    "--row",
    "--set",
    "--all",
    "--steps",
    "--engine",
    "--emulate",
    "--no-emulate",
    "--seeds",
    "--resume",
)
SUFFIXES = (
    "run --all or --row: .../mb, at equal micro-batch size, and .../pb, in the published balance"
)


def _size(row: Row) -> str:
    if not row.size:
        return "-"
    sizes = ", ".join(map(str, row.size))
    return f"({sizes})"


COLUMNS: list[Column[Row]] = [
    Column("row", lambda row: row.name, left=True),
    Column("size", _size, left=True),
    Column("batch", lambda row: str(row.batch_size)),
    Column("m", lambda row: str(row.chunks or "-")),
    Column("checkpoint", lambda row: row.checkpoint or "-"),
    Column("reproduces", lambda row: row.published or ""),
    Column("needs", lambda row: many(row.devices, "device")),
]


@command("list", "list unet-speed", name="list", cls=click.Command)
@click.argument("experiments", nargs=-1, **known("experiment", lambda: EXPERIMENTS))
@on
@devices
@style
def list_experiments(
    experiments: list[str], on: str | None, devices: int | None, style: str
) -> None:
    """List all experiments, or the rows of EXPERIMENTS.

    A row is one configuration to run. For each row, the list shows how many devices it needs, and
    which published row it reproduces. A note says whether the rows can run on this machine.
    """
    found = find_devices(on, devices)
    tables = []
    numbers: list[Number] = []
    for name in experiments:
        for scale in EXPERIMENTS[name].scales:
            rows = _table(EXPERIMENTS[name], scale, found)
            tables.append(rows)
            numbers += of_cells(rows, experiment=name, scale=scale.name)
    if not experiments:
        overview = _overview(found)
        tables.append(overview)
        numbers += of_cells(overview)
    text = []
    markdown = []
    for shown in tables:
        text.append(shown.text())
        markdown.append(shown.markdown())
    page = "\n\n".join(text) + "\n"
    markdown_page = "\n\n".join(markdown) + "\n"
    click.echo(written(style, numbers, page, markdown_page), nl=False)


def _overview(devices: Devices) -> Table:
    """Return a table with a row for each experiment."""
    rows = []
    for name, experiment in EXPERIMENTS.items():
        scale = "none"
        count = "-"
        minutes = "-"
        with contextlib.suppress(Error):  # if no scale fits, `list NAME` says why
            scale = choose_scale([experiment], devices, None)
            usual = [row for row in experiment.scale(scale).rows if not row.extra]
            count = str(len(usual))
            minutes = _minutes(name, scale)
        title = textwrap.fill(experiment.title, SHOWS)
        rows.append((name, title, scale, count, minutes))
    headings = ["name", "what it shows", "scale", "rows", "minutes"]
    return Table(f"Experiments, on {devices}", headings, rows, NOTES, 3)


def _minutes(name: str, scale: str) -> str:
    """Return how many minutes an experiment took in a complete earlier run, as text.

    For example, "12" is from a run in `runs`, "(12)" is from a run in `results/measured`, "<12" is
    from a run that also had other experiments, and "?" means that there is no such run.
    """
    own = _minutes_in(RUNS, name, scale)
    if own is not None:
        return own
    published = _minutes_in(MEASURED, name, scale)
    return "?" if published is None else f"({published})"


def _minutes_in(folder: Path, name: str, scale: str) -> str | None:
    """Like `_minutes`, for one folder of records."""
    for record in ranked(readable(folder), name):
        run = record.run
        if run is None or run.state != "finished" or record.scale != scale:
            continue
        if any(word.startswith(PARTIAL) for word in run.command):
            continue
        names = {result.experiment for result in record.results}
        minutes = f"{run.seconds / 60:.0f}"
        return f"<{minutes}" if len(names) > 1 else minutes
    return None


def _table(experiment: Experiment, scale: Scale, devices: Devices) -> Table:
    """Return a table of a scale's rows, with a note that says whether the rows can run here."""
    paper = "nobody has published these rows"
    if experiment.table:
        file = f"results/paper/{experiment.table}.json"
        paper = f"reproduces: rows of {experiment.table} ({file}); others are ours"
    notes = [paper, f"on {devices}: {_here(experiment, scale, devices)}"]
    if any("/" in row.name for row in scale.rows):
        notes.append(SUFFIXES)
    title = f"{experiment.name}, scale {scale.name}: {experiment.title}"
    return table(title, COLUMNS, scale.rows, notes)


def _here(experiment: Experiment, scale: Scale, devices: Devices) -> str:
    """Return a text that says how many rows of a scale can run on the devices, and how."""
    from reproduce.run.engines import engines

    count = len(scale.rows)
    reason = why_not(scale, devices)
    if reason:
        return f"cannot run; {reason}"
    if experiment.measures not in TIMED:
        return f"can run; all {count} rows"
    measured = 0
    by_ranks = 0
    for row in scale.rows:
        if row.devices <= devices.count:
            if engines.why_not("threads", row, devices) is None:
                measured += 1
            if engines.why_not("ranks", row, devices) is None:
                by_ranks += 1
    here = f"can run; measures {measured} and emulates all of {count} rows"
    if by_ranks:
        here += f"; --engine ranks measures {by_ranks}"
    return here
