"""Offer `python -m reproduce list`, which says what can be run."""

import contextlib
import textwrap

import click

from reproduce.cli.shared import command, devices, known, on, style
from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.choose import choose_scale, why_not
from reproduce.experiments.row import PUBLISHED_BALANCE, Experiment, Row, Scale
from reproduce.machine.devices import Devices, find_devices
from reproduce.records.places import MEASURED, RUNS
from reproduce.records.record import ranked, readable
from reproduce.tables.layout import Column, Table, many, table
from reproduce.tables.output import of_cells, written

SHOWS = 38  # width of the column "what it shows", in characters
NOTES = (
    "scale: the largest that this machine holds now",
    "minutes: of the last run of all rows, in runs; in brackets: in results/measured, which may have been on another "
    "machine; <: together with other experiments; ?: no such run",
    "python -m reproduce list NAME shows all rows; run --all runs all of them",
)
# A run with one of these options does not tell how long a usual run takes.
PARTIAL = (
    "--row",
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
COLUMNS: list[Column[Row]] = [
    Column("row", lambda row: row.name, left=True),
    Column(
        "size", lambda row: f"({', '.join(map(str, row.size))})" if row.size else "-", left=True
    ),
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
    """List experiments on one screen, or the rows of EXPERIMENTS.

    Of each row it says what it needs and what it reproduces, and of each scale whether it can run here.
    """
    found = find_devices(on, devices)
    both = [
        (EXPERIMENTS[name], scale) for name in experiments for scale in EXPERIMENTS[name].scales
    ]
    tables = [_table(experiment, scale, found) for experiment, scale in both] or [_overview(found)]
    text, markdown = (
        "\n\n".join(getattr(each, kind)() for each in tables) for kind in ("text", "markdown")
    )
    abouts = [
        {"experiment": experiment.name, "scale": scale.name} for experiment, scale in both
    ] or [{}]
    numbers = [
        x for each, about in zip(tables, abouts, strict=True) for x in of_cells(each, **about)
    ]
    click.echo(written(style, numbers, f"{text}\n", f"{markdown}\n"), nl=False)


def _overview(devices: Devices) -> Table:
    """Return a table with a row for each experiment."""
    rows = []
    for name, experiment in EXPERIMENTS.items():
        scale, count, minutes = "none", "-", "-"
        with contextlib.suppress(Error):  # no scale fits: `list NAME` says why
            scale = choose_scale([experiment], devices, None)
            count, minutes = (
                str(sum(not row.extra for row in experiment.scale(scale).rows)),
                _minutes(name, scale),
            )
        rows.append((name, textwrap.fill(experiment.title, SHOWS), scale, count, minutes))
    return Table(
        f"Experiments, on {devices}",
        ["name", "what it shows", "scale", "rows", "minutes"],
        rows,
        NOTES,
        3,
    )


def _minutes(name: str, scale: str) -> str:
    """Return how many minutes the newest known run of the experiment took, in the notation that `NOTES` explains."""
    for folder, form in ((RUNS, "{}"), (MEASURED, "({})")):
        for record in ranked(readable(folder), name):
            run, names = record.run, {result.experiment for result in record.results}
            if (
                run is None
                or run.state != "finished"
                or any(word.startswith(PARTIAL) for word in run.command)
            ):
                continue
            if record.scale == scale and name in names:
                return form.format(f"{'<' * (len(names) > 1)}{run.seconds / 60:.0f}")
    return "?"


def _table(experiment: Experiment, scale: Scale, devices: Devices) -> Table:
    """Return a table of the scale's rows, and say whether they can run here."""
    reason = why_not(scale, devices)
    from reproduce.run.engines import engines

    here = f"can run; all {len(scale.rows)} rows"
    if reason:
        here = f"cannot run; {reason}"
    elif experiment.measures in ("speed", "ablation"):
        measured = [
            r
            for r in scale.rows
            if r.devices <= devices.count and r.configuration != PUBLISHED_BALANCE
        ]
        here = f"can run; measures {len(measured)} and emulates all of {len(scale.rows)} rows"
        ranks = sum(engines.why_not("ranks", row, devices) is None for row in measured)
        here += f"; --engine ranks measures {ranks}" * bool(ranks)
    paper = f"reproduces: rows of {experiment.table} (results/paper/{experiment.table}.json); others are ours"
    notes = [
        paper if experiment.table else "nobody has published these rows",
        f"on {devices}: {here}",
    ]
    notes += [SUFFIXES] if any("/" in row.name for row in scale.rows) else []
    return table(
        f"{experiment.name}, scale {scale.name}: {experiment.title}", COLUMNS, scale.rows, notes
    )
