"""Offer `python -m reproduce list`, which says what can be run."""

import click

from reproduce.cli.shared import devices, on
from reproduce.experiments import AS_PUBLISHED, EXPERIMENTS, PUBLISHED_BALANCE, Experiment, Row, Scale
from reproduce.experiments.choose import why_not
from reproduce.machine.devices import Devices, find_devices
from reproduce.run.engines import engines
from reproduce.tables.layout import Column, Table, many, table

OURS = "nobody has published these rows; those named .../mb are at equal micro-batch size"
COLUMNS: list[Column[Row]] = [
    Column("row", lambda row: row.name, left=True),
    Column("size", lambda row: f"({', '.join(map(str, row.size))})" if row.size else "-", left=True),
    Column("batch", lambda row: str(row.batch_size)),
    Column("m", lambda row: str(row.chunks or "-")),
    Column("checkpoint", lambda row: row.checkpoint or "-"),
    Column("reproduces", lambda row: row.published or ""),
    Column("needs", lambda row: many(row.devices, "device")),
]


@click.command("list")
@on
@devices
def list_experiments(on: str | None, devices: int | None) -> None:
    """List experiments, their scales and their rows.

    It says of each row what it needs and what it reproduces, and of each scale whether it can run here.
    """
    found = find_devices(on, devices)
    tables = [
        each.text()
        for experiment in EXPERIMENTS.values()
        for scale in experiment.scales
        for each in _tables(experiment, scale, found)
    ]
    click.echo("\n\n".join(tables))


def _tables(experiment: Experiment, scale: Scale, devices: Devices) -> list[Table]:
    """Return a table of the rows that reproduce published ones, and one of ours, which nobody has published."""
    reason = why_not(scale, devices)
    if experiment.measures in ("speed", "ablation"):
        measured = [r for r in scale.rows if r.devices <= devices.count and r.configuration != PUBLISHED_BALANCE]
        rows = f"measures {len(measured)} and emulates all of {len(scale.rows)} rows"
        ranks = sum(engines.why_not("ranks", row, devices) is None for row in measured)
        rows += f"; --engine ranks measures {ranks}" * bool(ranks)
    else:
        rows = f"all {len(scale.rows)} rows"
    here = f"cannot run; {reason}" if reason else f"can run; {rows}"
    from_paper = f"reproduces rows of {experiment.table} (results/paper/{experiment.table}.json)"
    can_run = f"on {devices}: {here}"
    theirs = [row for row in scale.rows if row.published or row.configuration in (AS_PUBLISHED, PUBLISHED_BALANCE)]
    ours = [row for row in scale.rows if row not in theirs]
    name = f"{experiment.name}, scale {scale.name}"
    tables = [
        table(f"{name}: {experiment.title}", COLUMNS, theirs, [from_paper, can_run]),
        table(f"{name}, ours: {experiment.title}", COLUMNS, ours, [OURS if theirs else can_run]),
    ]
    return [each for each in tables if each.rows]
