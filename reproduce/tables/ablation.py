"""Make the ablation's table: throughput, utilization and memory as each component is added, beside the published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import AS_PUBLISHED, COMPONENTS, LIKE_PUBLISHED, Experiment
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, table
from reproduce.tables.rows import BUSY, ROW, THROUGHPUT, Rows, circumstances, problems, speed_up_text, what_busy_is

__all__ = ["ablation_tables"]

GiB = 2**30
ON_CPU = (
    "on CPU devices the pipeline runs its partitions in threads (engine='workers'). These keep by themselves the order "
    "that dependency enforces on an autograd graph (it matters to engine='graph' alone), and there are no copies that "
    "could go on streams: both switches are without effect, and differences between such rows are noise"
)
NO_DETOUR = "with n=2 no skip has a partition between its ends, so portals have nothing to save either"


def ablation_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table of the published rows, and one of ours, on fewer devices."""
    exact = [each for each in results if each.config["configuration"] in (AS_PUBLISHED, LIKE_PUBLISHED)]
    small = any(each.config["configuration"] == LIKE_PUBLISHED for each in exact)
    groups = {
        "like the published rows" if small else "as published": exact,
        "ours, on fewer devices": [each for each in results if each not in exact],
    }
    return [_table(name, Rows(experiment, group)) for name, group in groups.items() if group]


def _table(name: str, rows: Rows) -> Table:
    def published(value: str, form: str) -> Column[Result]:
        return Column("publ.", lambda result: form.format(paper.values[value]) if (paper := rows.paper(result)) else "")

    kind = "reserved" if any("peak_reserved" in result.values for result in rows) else "live"
    columns = [
        ROW,
        Column("dsp", lambda result: "".join("-x"[part in result.config["components"]] for part in COMPONENTS)),
        THROUGHPUT,
        Column("speed-up", lambda result: speed_up_text(result, rows.base(result), quartiles=False)),
        Column("publ.", rows.published_speed_up),
        BUSY,
        published("utilization", "{}%"),
        Column(f"GiB\n{kind}", _memory),
        published("memory", "{:.1f}"),
    ]
    hardware = rows.publication.hardware or {}
    notes = [
        circumstances(rows),
        "dsp: dependency, streams, portals; x where it is on. Speed-up: over the first row, taken round by round",
        *([f"published on {hardware.get('num_gpus')} x {hardware.get('gpu')}: U-Net (5, 64), reserved memory"]
          if any(result.published for result in rows) else []),
        *what_busy_is(rows),
        *([ON_CPU] if any(result.device == "cpu" for result in rows) else []),
        *([NO_DETOUR] if all(result.config["partitions"] == 2 for result in rows) else []),
        *problems(rows),
    ]  # fmt: skip
    return table(f"{rows.experiment.title}, {name}", columns, rows, notes)


def _memory(result: Result) -> str:
    peak = result.values.get("peak_reserved") or result.values.get("peak_allocated")
    return f"{sum(peak) / GiB:.2f}" if peak else ""
