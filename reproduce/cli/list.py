"""Define the command `list`, which lists all experiments and says which can run on this machine."""

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from reproduce.cli.job import TIMED
from reproduce.cli.shared import command, devices, known, on, shown, style
from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_scale, why_not
from reproduce.experiments.row import Experiment, Row, Scale
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import MEASURED, RUNS
from reproduce.records.record import is_continued, ranked, readable
from reproduce.tables.layout import Column, Table, many
from reproduce.tables.layout import table as make_table
from reproduce.tables.output import Number, written

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
)
SUFFIXES = (
    "run --all or --row: .../mb, at equal micro-batch size, and .../pb, in the published balance"
)


class Minutes(NamedTuple):
    """How long an earlier run of an experiment took.

    Attributes:
        minutes: The whole minutes of the run.
        alone: Whether the run had only this experiment, and no others.
        folder: The folder of the run's record: `RUNS` for the user's own runs, or `MEASURED` for
            committed runs, which may come from another machine.
    """

    minutes: int
    alone: bool
    folder: Path

    def __str__(self) -> str:
        """Return the minutes as a text such as "12".

        "<12" means that the run also had other experiments, so this one took less time. Brackets,
        as in "(12)", mean that the run's record (file of results) is in the folder `MEASURED`, so
        the run may come from another machine.
        """
        text = f"{self.minutes}" if self.alone else f"<{self.minutes}"
        return text if self.folder == RUNS else f"({text})"


class Overview(NamedTuple):
    """A line in the list that the command `list` prints: one experiment.

    Attributes:
        name: The name of the experiment.
        title: What the experiment shows.
        scale: The scale (set of sizes) that fits this machine, or None if no scale fits.
        rows: The number of rows (configurations) that a run has by default.
        minutes: How long an earlier run took, or None if there was no complete run.
    """

    name: str
    title: str
    scale: str | None = None
    rows: int | None = None
    minutes: Minutes | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of this line's cells in the list, from left to right."""
        title = textwrap.fill(self.title, SHOWS)
        if self.scale is None:
            return self.name, title, "none", "-", "-"
        minutes = "?" if self.minutes is None else str(self.minutes)
        return self.name, title, self.scale, str(self.rows), minutes

    def numbers(self) -> Iterator[Number]:
        """Yield the values for CSV and JSON."""
        about: Number = {"experiment": self.name, "row": self.name}
        yield {**about, "metric": "title", "value": self.title}
        yield {**about, "metric": "scale", "value": self.scale}
        yield {**about, "metric": "rows", "unit": "count", "value": self.rows}
        minutes: Number = {**about, "metric": "minutes", "unit": "min"}
        if self.minutes is None:
            minutes["reason"] = "no finished run of all rows"
        else:
            minutes["name"] = shown(self.minutes.folder)
            minutes["value" if self.minutes.alone else "upper"] = self.minutes.minutes
            if not self.minutes.alone:
                minutes["reason"] = "the run had other experiments, too"
        yield minutes


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
            numbers += _numbers(name, scale)
    if not experiments:
        overview = [_overview(experiment, found) for experiment in EXPERIMENTS.values()]
        headings = ["name", "what it shows", "scale", "rows", "minutes"]
        cells = [each.cells() for each in overview]
        tables.append(Table(f"Experiments, on {found}", headings, cells, NOTES, 3))
        for each in overview:
            numbers += each.numbers()
    text = []
    markdown = []
    for table in tables:
        text.append(table.text())
        markdown.append(table.markdown())
    page = "\n\n".join(text) + "\n"
    markdown_page = "\n\n".join(markdown) + "\n"
    click.echo(written(style, numbers, page, markdown_page), nl=False)


def _overview(experiment: Experiment, devices: Devices) -> Overview:
    name = experiment.name
    with contextlib.suppress(Error):  # if no scale fits, `list NAME` says why
        scale = choose_scale([experiment], devices, None)
        usual = [row for row in experiment.scale(scale).rows if not row.extra]
        minutes = _minutes_in(RUNS, name, scale) or _minutes_in(MEASURED, name, scale)
        return Overview(name, experiment.title, scale, len(usual), minutes)
    return Overview(name, experiment.title)


def _minutes_in(folder: Path, name: str, scale: str) -> Minutes | None:
    """Return how long a complete run of an experiment took, or None if `folder` has no such run.

    If there are several complete runs, take the time of the best one (`ranked` orders them).
    """
    for record in ranked(readable(folder), name):
        run = record.run
        if run is None or run.state != "finished" or record.scale != scale:
            continue
        if is_continued(record) or any(word.startswith(PARTIAL) for word in run.command):
            continue
        names = {result.experiment for result in record.results}
        return Minutes(round(run.seconds / 60), len(names) == 1, folder)
    return None


def _numbers(name: str, scale: Scale) -> Iterator[Number]:
    """Yield entries for CSV or JSON: one for each setting of each row (configuration) of a scale.

    A scale is a named set of sizes for all rows.
    """
    for row in scale.rows:
        about: Number = {"experiment": name, "scale": scale.name, "row": row.name}
        settings = {
            "size": list(row.size) or None,
            "batch_size": row.batch_size,
            "chunks": row.chunks,
            "checkpoint": row.checkpoint,
            "published": row.published,
            "devices": row.devices,
        }
        for metric, value in settings.items():
            yield {**about, "metric": metric, "value": value}


def _table(experiment: Experiment, scale: Scale, devices: Devices) -> Table:
    """Return a table of the rows (configurations) of an experiment at a scale (a set of sizes).

    A note below the table says how many of the rows can run on the given devices.
    """
    paper = "nobody has published these rows"
    if experiment.table:
        file = f"results/paper/{experiment.table}.json"
        paper = f"reproduces: rows of {experiment.table} ({file}); others are ours"
    notes = [paper, f"on {devices}: {_here(experiment, scale, devices)}"]
    if any("/" in row.name for row in scale.rows):
        notes.append(SUFFIXES)
    title = f"{experiment.name}, scale {scale.name}: {experiment.title}"
    return make_table(title, COLUMNS, scale.rows, notes)


def _here(experiment: Experiment, scale: Scale, devices: Devices) -> str:
    """Return a text that says how many rows of a scale can run on the given devices.

    A scale is a set of rows (configurations). A row can run if it can be measured or emulated. If
    no row can run, the text says why.
    """
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
    here = f"can run; measures up to {measured} and emulates all of {count} rows"
    if by_ranks:
        here += f"; --engine ranks measures {by_ranks}"
    return here
