"""Make the speed tables: throughput, and speed-up over the row that each is compared with; also as published."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.experiments import Experiment
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, in_lines, span
from reproduce.tables.rows import BUSY, ROW, THROUGHPUT, Rows, config, is_published

SMALLER = "n and m as published, with a smaller model and batch: compare the shape, not the numbers"


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return tables of the published rows, of ours at equal batch and at equal micro-batch size, of utilization."""
    published = Rows(experiment, [each for each in results if is_published(each)])
    tables = [_as_published(published)] if published.results else []
    for equal in ("batch", "micro-batch"):
        ours = [each for each in results if not is_published(each) and (each.config.get("equal") or "batch") == equal]
        if ours:
            tables.append(_ours(equal, Rows(experiment, ours)))
    observed = [result for result in results if "bubble" in result.values]
    return [*tables, _utilization(Rows(experiment, observed))] if observed else tables


def _ours(equal: str, rows: Rows) -> Table:
    first = min(result.config["partitions"] for result in rows if result.config["partitions"] != 1)
    columns = [
        Column[Result]("configuration", lambda result: result.config["configuration"], left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        THROUGHPUT,
        Column("over naive\n(quartiles)", lambda result: rows.speed_up(result, result.over)),
        Column("over one\ndevice", lambda result: rows.speed_up(result, result.over_published, quartiles=False)),
        Column("published\nover m=1", rows.published_speed_up),
    ]
    notes = [
        rows.circumstances(),
        "nobody has published these rows: they are ours, to tell pipelining from larger batches",
        f"over naive: of the same n (checkpoint-only: over naive n={first}), taken round by round",
    ]
    if equal == "micro-batch":
        size = span([result.config["micro_batch_size"] for result in rows])
        notes.append(f"micro-batch size {size}, so the batch size is {size} x m")
    elif any(result.published for result in rows):
        notes += [*rows.experiment.notes, rows.about_publication()]
    notes.append("small micro-batches may be faster or slower by themselves: checkpoint-only shows by how much")
    return rows.table(f", ours at equal {equal} size", columns, [*notes, *rows.problems()])


def _as_published(rows: Rows) -> Table:
    modes = {result.config["checkpoint"] for result in rows if result.config["chunks"] is not None}
    columns = [
        ROW,
        config("batch", "batch_size"),
        config("m", "chunks") if len(modes) == 1 else config("checkpoint", "checkpoint"),
        THROUGHPUT,
        Column("publ.", rows.published_throughput),
        Column("speed-up\n(quartiles)", lambda result: rows.speed_up(result, result.over)),
        Column("publ.", rows.published_speed_up),
    ]
    bases = dict.fromkeys(result.over for result in rows if result.over)
    notes = [
        rows.circumstances(),
        SMALLER if "like" in rows.published_title else None,
        f"speed-up: over {', '.join(bases)}, taken round by round",
        rows.about_publication(),
        *rows.problems(),
    ]
    return rows.table(rows.published_title, columns, notes)


def _utilization(rows: Rows) -> Table:
    def each_device(result: Result) -> str:
        return in_lines([f"{share:.0%}" for share in result.values.get("utilization") or []]) or "-"

    columns = [
        ROW,
        Column("each device", each_device),
        Column("mean", lambda result: BUSY.cell(result) or "-"),
        Column("bubble", lambda result: f"{result.values['bubble']:.0%}"),
    ]
    notes = [
        *rows.what_busy_is(),
        "bubble: share of the devices' time, from a step's first task to its last, in which they waited",
        "of one step of each row that was not timed, or of a few",
    ]
    return rows.table(": how busy the devices were", columns, notes)
