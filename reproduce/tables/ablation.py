"""Make the ablation's table: throughput, utilization and memory as each component is added; also as published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import COMPONENTS, Experiment
from reproduce.numbers.metrics import BYTES
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table
from reproduce.tables.rows import BUSY, ROW, Rows

UNORDERED = (
    "without the dependency nothing asks for a recomputation before its gradient is there; without streams of their "
    "own, copies run among the tasks of both sides; without portals, skips go through every partition on their way"
)


def ablation_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table of the published rows."""
    rows = Rows(experiment, results)
    kind = "reserved" if any("peak_reserved" in result.values for result in rows) else "live"
    columns = [
        ROW,
        Column("dsp", lambda result: "".join("-x"[part in result.config["components"]] for part in COMPONENTS)),
        rows.throughput(),
        Column("speed-up", lambda result: rows.speed_up(result, result.over, quartiles=False)),
        Column("publ.", rows.published_speed_up),
        BUSY,
        rows.published("publ.", "utilization", "{:.0f}%"),
        Column(f"GiB\n{kind}", _memory),
        rows.published("publ.", "memory", "{:.1f}"),
    ]
    notes = [
        rows.circumstances(),
        "dsp: dependency, streams, portals; x where it is on. Speed-up: over the first row, taken round by round",
        f"published on {rows.published_on}: U-Net (5, 64), reserved memory" if any(map(rows.paper, rows)) else None,
        UNORDERED,
        *rows.about_emulation(),
        *rows.what_busy_is(),
        *rows.problems(),
    ]
    return [rows.table(rows.published_title, columns, notes)]


def _memory(result: Result) -> str | None:
    peak = result.values.get("peak_reserved") or result.values.get("peak_allocated")
    return f"{sum(peak) / BYTES['GiB']:.2f}" if peak else None
