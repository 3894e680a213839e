"""Offer `python -m reproduce list`."""

from __future__ import annotations

import click

from reproduce.experiments import AS_PUBLISHED, EXPERIMENTS, LIKE_PUBLISHED, Experiment, Row, Scale
from reproduce.experiments.scale import why_not
from reproduce.machine.devices import Devices, find_devices
from reproduce.tables.layout import Table, many


@click.command("list")
@click.option("--on", type=click.Choice(["cpu", "cuda", "meta"]), help="Kind of devices. Default: CUDA if any.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many devices. Default: all.")
def list_experiments(on: str | None, devices: int | None) -> None:
    """List every experiment, scale and row: what it needs and what it reproduces."""
    click.echo(listing(find_devices(on, devices)))


def listing(devices: Devices) -> str:
    """Return the list for a terminal, as seen from a machine with these devices."""
    parts = [
        table.text()
        for experiment in EXPERIMENTS.values()
        for scale in experiment.scales
        for table in _tables(experiment, scale, devices)
    ]
    return "\n\n".join(parts)


def _tables(experiment: Experiment, scale: Scale, devices: Devices) -> list[Table]:
    """Return a table of the rows that reproduce published ones, and one of ours, which nobody has published."""
    reason = why_not(scale, devices)
    here = f"cannot run; {reason}" if reason else f"can run; {_runnable(scale, devices)} of {len(scale.rows)} rows"
    notes = [
        f"reproduces rows of {experiment.table} (results/paper/{experiment.table}.json)",
        f"on {devices}: {here}",
    ]
    ours = [row for row in scale.rows if row.configuration not in (AS_PUBLISHED, LIKE_PUBLISHED) and not row.published]
    groups = (
        ("", [row for row in scale.rows if row not in ours], notes),
        (", ours", ours, ["nobody has published these rows; those named .../mb are at equal micro-batch size"]),
    )
    return [
        Table(
            title=f"{experiment.name}, scale {scale.name}{marked}: {experiment.title}",
            headings=("row", "size", "batch", "m", "checkpoint", *([] if marked else ["reproduces"]), "needs"),
            rows=[_row(row, reproduces=not marked) for row in rows],
            notes=notes,
            left=2,
        )
        for marked, rows, notes in groups
        if rows
    ]


def _row(row: Row, reproduces: bool) -> list[str]:
    return [
        row.name,
        "({})".format(", ".join(map(str, row.size))) if row.size else "-",
        str(row.batch_size),
        str(row.chunks or "-"),
        row.checkpoint or "-",
        *([row.published or "-"] if reproduces else []),
        many(row.devices, "device"),
    ]


def _runnable(scale: Scale, devices: Devices) -> int:
    return sum(row.devices <= devices.count for row in scale.rows)
