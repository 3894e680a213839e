"""Make the ablation's table: throughput, utilization and memory as each component is added; also as published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import COMPONENTS, Experiment
from reproduce.numbers.metrics import BYTES
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table
from reproduce.tables.rows import BUSY, ROW, THROUGHPUT, Rows, is_published

ON_CPU = (
    "on CPU devices the pipeline runs its partitions in threads (engine='workers'). These keep by themselves the order "
    "that dependency enforces on an autograd graph (it matters to engine='graph' alone), and there are no copies that "
    "could go on streams: both switches are without effect, and differences between such rows are noise"
)
NO_DETOUR = "with n=2 no skip has a partition between its ends, so portals have nothing to save either"


def ablation_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of the published rows, and one of ours, on fewer devices."""
    published = Rows(experiment, [each for each in results if is_published(each)])
    ours = Rows(experiment, [each for each in results if not is_published(each)])
    titles = (published.published_title, published), (", ours, on fewer devices", ours)
    return [_table(title, rows) for title, rows in titles if rows.results]


def _table(title: str, rows: Rows) -> Table:
    kind = "reserved" if any("peak_reserved" in result.values for result in rows) else "live"
    columns = [
        ROW,
        Column("dsp", lambda result: "".join("-x"[part in result.config["components"]] for part in COMPONENTS)),
        THROUGHPUT,
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
        *rows.what_busy_is(),
        ON_CPU if any(result.device == "cpu" for result in rows) else None,
        NO_DETOUR if all(result.config["partitions"] == 2 for result in rows) else None,
        *rows.problems(),
    ]
    return rows.table(title, columns, notes)


def _memory(result: Result) -> str | None:
    peak = result.values.get("peak_reserved") or result.values.get("peak_allocated")
    return f"{sum(peak) / BYTES['GiB']:.2f}" if peak else None
