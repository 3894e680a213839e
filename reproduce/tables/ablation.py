"""Make the ablation's table: throughput, utilization and memory as each component is added, beside the published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import AS_PUBLISHED, COMPONENTS, LIKE_PUBLISHED, Experiment
from reproduce.records.published import published
from reproduce.records.record import Result
from reproduce.tables.cells import (
    Results,
    circumstances,
    paper_ratio,
    paper_row,
    papers_of,
    problems,
    speed_up_cell,
    throughput_cell,
    without_empty,
)
from reproduce.tables.layout import Table
from reproduce.tables.utilization import busy_cell, busy_notes

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
    exact = {each.row: each for each in results if each.config["configuration"] in (AS_PUBLISHED, LIKE_PUBLISHED)}
    ours = {each.row: each for each in results if each.row not in exact}
    small = any(each.config["configuration"] == LIKE_PUBLISHED for each in exact.values())
    named = (("like the published rows" if small else "as published", exact), ("ours, on fewer devices", ours))
    return [_table(f"{experiment.title}, {name}", experiment, group) for name, group in named if group]


def _table(title: str, experiment: Experiment, results: Results) -> Table:
    papers = papers_of(experiment)
    rows = []
    for result in results.values():
        over, paper = results.get(result.over or ""), paper_row(result, papers)
        rows.append(
            [
                result.row,
                "".join("x" if part in result.config["components"] else "-" for part in COMPONENTS),
                throughput_cell(result),
                speed_up_cell(result, over, quartiles=False),
                paper_ratio(paper, paper_row(over, papers)),
                busy_cell(result),
                "" if paper is None else f"{paper.values['utilization']}%",
                _memory(result),
                "" if paper is None else f"{paper.values['memory']:.1f}",
            ]
        )
    kind = "reserved" if any("peak_reserved" in result.values for result in results.values()) else "live"
    headings = ("row", "dsp", "samples/s\n(quartiles)", "speed-up", "publ.", "busy", "publ.", f"GiB\n{kind}", "publ.")
    hardware = published(experiment.table).hardware or {}
    notes = [
        circumstances(results),
        "dsp: dependency, streams, portals; x where it is on. Speed-up: over the first row, taken round by round",
        *([f"published on {hardware.get('num_gpus')} x {hardware.get('gpu')}: U-Net (5, 64), reserved memory"]
          if any(result.published for result in results.values()) else []),
        *busy_notes(results.values()),
        *([ON_CPU] if any(result.device == "cpu" for result in results.values()) else []),
        *([NO_DETOUR] if all(result.config["partitions"] == 2 for result in results.values()) else []),
        *problems(results),
    ]  # fmt: skip
    return Table(title, *without_empty(headings, rows), notes)


def _memory(result: Result) -> str:
    peak = result.values.get("peak_reserved") or result.values.get("peak_allocated")
    return f"{sum(peak) / GiB:.2f}" if peak else ""
