"""Make the speed tables: throughput, and speed-up over the row that each is compared with; also as published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reproduce.experiments import PUBLISHED_BALANCE, Experiment
from reproduce.records.record import Result
from reproduce.tables.layout import Column, Table, in_lines, span
from reproduce.tables.rows import BUSY, ROW, Rows, config, is_published
from reproduce.tables.zoo import zoo_table

SMALLER = "n and m as published, with a smaller model and batch: compare the shape, not the numbers"


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table for each group of rows, and one of how busy the devices were; of many models, one for all."""
    if results[0].config.get("equal") == "model":
        return [zoo_table(experiment, results)]
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_group(result), []).append(result)
    tables = []
    for group, chosen in groups.items():
        if group == PUBLISHED_BALANCE:
            table = _balances(Rows(experiment, chosen), Rows(experiment, [each for each in results if each.published]))
        elif is_published(chosen[0]):
            table = _as_published(Rows(experiment, chosen))
        else:
            table = _ours(group, Rows(experiment, chosen))
        tables.append(replace(table, group=group))
    observed = Rows(experiment, [result for result in results if "bubble" in result.values])
    return [*tables, replace(_utilization(observed), group="utilization")] if observed.results else tables


def _group(result: Result) -> str:
    """Name the rows that a row is compared with, as `Row.group` does; older runs have rows without `equal`."""
    return str(result.config["configuration"] if is_published(result) else result.config.get("equal") or "batch")


def _ours(equal: str, rows: Rows) -> Table:
    first = min((result.config["partitions"] for result in rows if result.config["partitions"] != 1), default=2)
    columns = [
        Column[Result]("configuration", lambda result: result.config["configuration"], left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        rows.throughput(),
        Column("over naive\n(quartiles)", lambda result: rows.speed_up(result, result.over)),
        *rows.beside(),
    ]
    notes = [
        rows.circumstances(),
        "nobody has published these rows: they are ours, to tell pipelining from larger batches",
        f"over naive: of the same n (checkpoint-only: over naive n={first}), taken round by round",
    ]
    if equal == "micro-batch":
        size = span([result.config["micro_batch_size"] for result in rows])
        notes.append(f"micro-batch size {size}, so the batch size is {size} x m")
    notes.append("small micro-batches may be faster or slower by themselves: checkpoint-only shows by how much")
    return rows.table(f", ours at equal {equal} size", columns, [*notes, *rows.about_emulation(), *rows.problems()])


def _as_published(rows: Rows) -> Table:
    modes = {result.config["checkpoint"] for result in rows if result.config["chunks"] is not None}
    quartiles = not (rows.emulated and any(map(rows.published_throughput, rows)))  # there is no room for everything
    columns = [
        ROW,
        config("batch", "batch_size"),
        config("m", "chunks") if len(modes) == 1 else config("checkpoint", "checkpoint"),
        rows.throughput(),
        Column("publ.", rows.published_throughput),
        Column("speed-up" + "\n(quartiles)" * quartiles, lambda each: rows.speed_up(each, each.over, quartiles)),
        Column("publ.", rows.published_speed_up),
        *rows.beside(),
    ]
    bases = dict.fromkeys(result.over for result in rows if result.over)
    notes = [
        rows.circumstances(),
        SMALLER if "like" in rows.published_title else None,
        f"speed-up: over {', '.join(bases)}, taken round by round",
        *rows.about_emulation(),
        rows.about_publication(),
        *rows.problems(),
    ]
    return rows.table(rows.published_title, columns, notes)


def _balances(rows: Rows, profiled: Rows) -> Table:
    """Make the table of what the published balance is worth beside the one that was profiled here."""

    def here(result: Result) -> Result | None:
        return profiled.named(result.row.partition("/")[0])

    def balance(result: Result | None) -> str | None:
        return None if result is None else " ".join(map(str, result.config["balance"] or ()))

    def speed_up(result: Result | None) -> str | None:
        return None if result is None else profiled.speed_up(result, result.over, quartiles=False)

    columns: list[Column[Result]] = [
        Column[Result]("row", lambda result: result.row.partition("/")[0], left=True),
        Column[Result]("profiled here", lambda result: balance(here(result)), left=True),
        Column("speed-\nup", lambda result: speed_up(here(result))),
        Column[Result]("published balance", balance),
        Column("speed-\nup", speed_up),
        Column("publ.", lambda result: profiled.published_speed_up(paper) if (paper := here(result)) else None),
    ]
    notes = [
        "the rows like the published once more, in the balance that suited the published machine; speed-ups as above",
        *rows.about_emulation(),
        *rows.problems(),
    ]
    return rows.table(": what the published balance is worth here", columns, notes)


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
        "of one step of each row",
    ]
    return rows.table(f": how busy the {'emulated ' if rows.emulated else ''}devices were", columns, notes)
