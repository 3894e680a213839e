"""Make the speed tables: throughput, and speed-up over the row that each is compared with, beside the published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import AS_PUBLISHED, LIKE_PUBLISHED, Experiment
from reproduce.records.record import Result
from reproduce.tables.cells import (
    Results,
    about_publication,
    circumstances,
    count,
    paper_ratio,
    paper_row,
    papers_of,
    problems,
    speed_up_cell,
    three_digits,
    throughput_cell,
    without_empty,
)
from reproduce.tables.layout import Table, span
from reproduce.tables.utilization import utilization_tables

__all__ = ["speed_tables"]

PUBLISHED = (AS_PUBLISHED, LIKE_PUBLISHED)


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return tables of the published rows, of ours at equal batch and at equal micro-batch size, of utilization."""
    groups: dict[str, dict[str, Result]] = {AS_PUBLISHED: {}, "batch": {}, "micro-batch": {}}
    for result in results:
        published = result.config["configuration"] in PUBLISHED
        groups[AS_PUBLISHED if published else result.config.get("equal") or "batch"][result.row] = result
    papers = papers_of(experiment)
    makers = {AS_PUBLISHED: _as_published, "batch": _at_equal_batch, "micro-batch": _at_equal_micro_batch}
    made = [make(experiment, groups[group], papers) for group, make in makers.items() if groups[group]]
    return [*made, *utilization_tables(experiment, results)]


def _at_equal_batch(experiment: Experiment, results: Results, papers: Results) -> Table:
    notes = [*experiment.notes, about_publication(experiment, papers)] if _mentioned(results) else []
    return _controls("batch size", experiment, results, papers, notes)


def _at_equal_micro_batch(experiment: Experiment, results: Results, papers: Results) -> Table:
    sizes = [result.config["micro_batch_size"] for result in results.values()]
    notes = [f"micro-batch size {span(sizes)}, so the batch size is {span(sizes)} x m"]
    return _controls("micro-batch size", experiment, results, papers, notes)


def _controls(what: str, experiment: Experiment, results: Results, papers: Results, notes: Sequence[str]) -> Table:
    rows = []
    for result in results.values():
        over = results.get(result.over or "")
        rows.append(
            [
                result.config["configuration"],
                count(result.config["partitions"]),
                count(result.config["chunks"]),
                throughput_cell(result),
                speed_up_cell(result, over),
                speed_up_cell(result, results.get(result.over_published or ""), quartiles=False),
                paper_ratio(paper_row(result, papers), paper_row(over, papers)),
            ]
        )
    headings = (
        "configuration",
        "n",
        "m",
        "samples/s\n(quartiles)",
        "over naive\n(quartiles)",
        "over m=1,\nalways",
        "published\nlikewise",
    )
    first = min(result.config["partitions"] for result in results.values() if result.config["partitions"] != 1)
    notes = [
        circumstances(results),
        "nobody has published these rows: they are ours, to tell pipelining from larger batches",
        f"over naive: of the same n (checkpoint-only: over naive n={first}), taken round by round",
        *notes,
        "small micro-batches may be faster or slower by themselves: checkpoint-only shows by how much",
        *problems(results),
    ]
    return Table(f"{experiment.title}, ours at equal {what}", *without_empty(headings, rows), notes)


def _as_published(experiment: Experiment, results: Results, papers: Results) -> Table:
    modes = {result.config["checkpoint"] for result in results.values() if result.config["chunks"] is not None}
    exact = all(result.config["configuration"] == AS_PUBLISHED for result in results.values())
    rows = []
    for result in results.values():
        over, paper = results.get(result.over or ""), paper_row(result, papers)
        rows.append(
            [
                result.row,
                str(result.config["batch_size"]),
                count(result.config["chunks"]) if len(modes) == 1 else str(result.config["checkpoint"]),
                throughput_cell(result),
                three_digits(paper.values["throughput"]) if paper is not None and exact else "",
                speed_up_cell(result, over),
                paper_ratio(paper, paper_row(over, papers)),
            ]
        )
    headings = (
        "row",
        "batch",
        "m" if len(modes) == 1 else "checkpoint",
        "samples/s\n(quartiles)",
        "publ.",
        "speed-up\n(quartiles)",
        "publ.",
    )
    bases = dict.fromkeys(result.over for result in results.values() if result.over)
    notes = [
        circumstances(results),
        f"speed-up: over {', '.join(map(str, bases))}, taken round by round",
        about_publication(experiment, papers),
        *problems(results),
    ]
    if not exact:
        notes.insert(1, "n and m as published, with a smaller model and batch: compare the shape, not the numbers")
    title = f"{experiment.title}, {'as published' if exact else 'like the published rows'}"
    return Table(title, *without_empty(headings, rows), notes)


def _mentioned(results: Results) -> bool:
    """Tell whether the table shows anything published."""
    return any(result.published for result in results.values())
