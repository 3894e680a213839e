"""List the experiments: every scale and row, what it needs, what it reproduces, and whether it can run here."""

from __future__ import annotations

from reproduce.devices import Devices
from reproduce.experiments import EXPERIMENTS, Experiment, Row, Scale
from reproduce.layout import Table
from reproduce.scale import why_not

__all__ = ["listing"]


def listing(devices: Devices) -> str:
    """Return the list for a terminal, as seen from a machine with these devices."""
    parts = [
        _table(experiment, scale, devices).text() for experiment in EXPERIMENTS.values() for scale in experiment.scales
    ]
    return "\n\n".join(parts)


def _table(experiment: Experiment, scale: Scale, devices: Devices) -> Table:
    reason = why_not(scale, devices)
    return Table(
        title=f"{experiment.name}, scale {scale.name}: {experiment.title}",
        headings=("row", "size", "batch", "n", "m", "checkpoint", "reproduces", "needs"),
        rows=[_row(row) for row in scale.rows],
        notes=[
            f"reproduces rows of {experiment.table} (results/paper/{experiment.table}.json)",
            f"on {devices}: "
            + (
                f"cannot run; {reason}" if reason else f"can run; {_runnable(scale, devices)} of {len(scale.rows)} rows"
            ),
        ],
        left=2,
    )


def _row(row: Row) -> list[str]:
    return [
        row.name,
        "({})".format(", ".join(map(str, row.size))),
        str(row.batch_size),
        str(row.partitions or "-"),
        str(row.chunks or "-"),
        row.checkpoint or "-",
        row.published or "-",
        f"{row.devices} device" + ("" if row.devices == 1 else "s"),
    ]


def _runnable(scale: Scale, devices: Devices) -> int:
    return sum(row.devices <= devices.count for row in scale.rows)
