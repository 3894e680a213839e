"""Make the speed tables: throughput, and speed-up over the row that each is compared with, beside the published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import AS_PUBLISHED, LIKE_PUBLISHED, Experiment
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, in_lines, span, table
from reproduce.tables.rows import (
    BUSY,
    ROW,
    THROUGHPUT,
    Rows,
    about_publication,
    circumstances,
    config,
    problems,
    speed_up_text,
    what_busy_is,
)

__all__ = ["speed_tables"]

SMALLER = "n and m as published, with a smaller model and batch: compare the shape, not the numbers"


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return tables of the published rows, of ours at equal batch and at equal micro-batch size, of utilization."""
    groups: dict[str, list[Result]] = {AS_PUBLISHED: [], "batch": [], "micro-batch": []}
    for result in results:
        published = result.config["configuration"] in (AS_PUBLISHED, LIKE_PUBLISHED)
        groups[AS_PUBLISHED if published else result.config.get("equal") or "batch"].append(result)
    rows = {name: Rows(experiment, group) for name, group in groups.items() if group}
    tables = [_as_published(own) if name == AS_PUBLISHED else _ours(name, own) for name, own in rows.items()]
    watched = [result for result in results if "bubble" in result.values]
    return [*tables, _utilization(Rows(experiment, watched))] if watched else tables


def _ours(equal: str, rows: Rows) -> Table:
    columns = [
        Column[Result]("configuration", lambda result: result.config["configuration"], left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        THROUGHPUT,
        Column[Result]("over naive\n(quartiles)", lambda result: speed_up_text(result, rows.base(result))),
        Column[Result](
            "over one\ndevice",
            lambda result: speed_up_text(result, rows.named(result.over_published), quartiles=False),
        ),
        Column("published\nover m=1", rows.published_speed_up),
    ]
    first = min(result.config["partitions"] for result in rows if result.config["partitions"] != 1)
    notes: Sequence[str] = ()
    if equal == "micro-batch":
        size = span([result.config["micro_batch_size"] for result in rows])
        notes = [f"micro-batch size {size}, so the batch size is {size} x m"]
    elif any(result.published for result in rows):
        notes = [*rows.experiment.notes, about_publication(rows)]
    notes = [
        circumstances(rows),
        "nobody has published these rows: they are ours, to tell pipelining from larger batches",
        f"over naive: of the same n (checkpoint-only: over naive n={first}), taken round by round",
        *notes,
        "small micro-batches may be faster or slower by themselves: checkpoint-only shows by how much",
        *problems(rows),
    ]
    return table(f"{rows.experiment.title}, ours at equal {equal} size", columns, rows, notes)


def _as_published(rows: Rows) -> Table:
    modes = {result.config["checkpoint"] for result in rows if result.config["chunks"] is not None}
    exact = all(result.config["configuration"] == AS_PUBLISHED for result in rows)
    columns = [
        ROW,
        config("batch", "batch_size"),
        config("m", "chunks") if len(modes) == 1 else config("checkpoint", "checkpoint"),
        THROUGHPUT,
        Column("publ.", rows.published_throughput),
        Column[Result]("speed-up\n(quartiles)", lambda result: speed_up_text(result, rows.base(result))),
        Column("publ.", rows.published_speed_up),
    ]
    bases = dict.fromkeys(result.over for result in rows if result.over)
    notes = [
        circumstances(rows),
        *([] if exact else [SMALLER]),
        f"speed-up: over {', '.join(bases)}, taken round by round",
        about_publication(rows),
        *problems(rows),
    ]
    return table(f"{rows.experiment.title}, {'as' if exact else 'like the'} published{'' if exact else ' rows'}",
                 columns, rows, notes)  # fmt: skip


def _utilization(rows: Rows) -> Table:
    columns = [
        ROW,
        Column[Result](
            "each device",
            lambda result: in_lines([f"{share:.0%}" for share in result.values.get("utilization") or []]) or "-",
        ),
        Column[Result]("mean", lambda result: BUSY.cell(result) or "-"),
        Column[Result]("bubble", lambda result: f"{result.values['bubble']:.0%}"),
    ]
    notes = [
        *what_busy_is(rows),
        "bubble: share of the devices' time, from a step's first task to its last, in which they waited",
        "of one step of each row that was not timed, or of a few",
    ]
    return table(f"{rows.experiment.title}: how busy the devices were", columns, rows, notes)
