"""Make the tables of speed and of the ablation: throughput and speed-up, also the published ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from reproduce.experiments.row import (
    COMPONENTS,
    EQUAL_LAYERS,
    PLANNED,
    PUBLISHED_BALANCE,
    Experiment,
)
from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import outcome
from reproduce.records.record import Result
from reproduce.tables.layout import Column, GiB, Table, in_lines, number, ratio, span
from reproduce.tables.rows import BUSY, ROW, Rows, config, is_published, speed

SMALLER = "n and m as published, with a smaller model and batch: compare the shape, not the numbers"
UNORDERED = (
    "without the dependency nothing asks for a recomputation before its gradient is there; without streams of their "
    "own, copies run among the tasks of both sides; without portals, skips go through every partition on their way"
)


def speed_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a table for each group of rows, and one of utilization; if groups are models, one table for all."""
    if results[0].config.get("equal") == "model":
        return [zoo_table(experiment, results)]
    tables = []
    for group, chosen in grouped(results, _group).items():
        rows = Rows(experiment, chosen)
        if group == PUBLISHED_BALANCE:
            table = _balances(rows, Rows(experiment, [each for each in results if each.published]))
        else:
            table = _as_published(rows) if is_published(chosen[0]) else _ours(group, rows)
        tables.append(replace(table, group=group))
    observed = [result for result in results if "bubble" in result.values]
    return (
        [*tables, replace(_utilization(Rows(experiment, observed)), group="utilization")]
        if observed
        else tables
    )


def ablation_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table of the published rows."""
    rows = Rows(experiment, results)
    kind = "reserved" if any("peak_reserved" in result.values for result in rows) else "live"

    def peak(result: Result) -> float | None:
        return (
            sum(result.values.get("peak_reserved") or result.values.get("peak_allocated") or [])
            / GiB
            or None
        )

    columns = [
        ROW,
        Column(
            "dsp",
            lambda result: "".join(
                "-x"[part in result.config["components"]] for part in COMPONENTS
            ),
        ),
        rows.throughput(),
        rows.over("speed-up"),
        Column("publ.", rows.published_speed_up, ratio),
        BUSY,
        rows.published("publ.", "utilization", "{:.0f}%"),
        Column(f"GiB\n{kind}", peak, "{:.2f}"),
        rows.published("publ.", "memory", "{:.1f}"),
    ]
    notes = [
        rows.circumstances(),
        "dsp: dependency, streams, portals; x where it is on. Speed-up: over the first row, taken round by round",
        f"published on {rows.published_on}: U-Net (5, 64), reserved memory"
        if any(map(rows.paper, rows))
        else None,
        UNORDERED,
        *rows.about_emulation(),
        *rows.what_busy_is(),
        *rows.problems(),
    ]
    return [rows.table(rows.published_title, columns, notes)]


def _group(result: Result) -> str:
    """Return the row's group, as `Row.group` does. Rows of older runs may lack `equal`."""
    return str(
        result.config["configuration"]
        if is_published(result)
        else result.config.get("equal") or "batch"
    )


def _ours(equal: str, rows: Rows) -> Table:
    first = min(
        (result.config["partitions"] for result in rows if result.config["partitions"] != 1),
        default=2,
    )
    columns = [
        Column[Result]("configuration", lambda result: result.config["configuration"], left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        rows.throughput(),
        rows.over("over naive\n(quartiles)", quartiles=True),
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
    notes.append(
        "small micro-batches may be faster or slower by themselves: checkpoint-only shows by how much"
    )
    return rows.table(
        f", ours at equal {equal} size",
        columns,
        [*notes, *rows.about_emulation(), *rows.problems()],
    )


def _as_published(rows: Rows) -> Table:
    modes = {result.config["checkpoint"] for result in rows if result.config["chunks"] is not None}
    quartiles = not (
        rows.emulated and any(map(rows.published_throughput, rows))
    )  # the published column needs the room
    columns = [
        ROW,
        config("batch", "batch_size"),
        config("m", "chunks") if len(modes) == 1 else config("checkpoint", "checkpoint"),
        rows.throughput(),
        Column("publ.", rows.published_throughput, number),
        rows.over("speed-up" + "\n(quartiles)" * quartiles, quartiles),
        Column("publ.", rows.published_speed_up, ratio),
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
    """Make the table that compares the published balance with the one that was profiled here."""

    def here(result: Result) -> Result | None:
        return profiled.named(result.row.partition("/")[0])

    def balance(result: Result) -> str:
        return in_lines(result.config["balance"] or (), "{}", gap=" ")

    columns = [
        Column[Result]("row", lambda result: result.row.partition("/")[0], left=True),
        Column("profiled here", balance, left=True).of(here),
        profiled.over("speed-\nup").of(here),
        Column("published balance", balance),
        profiled.over("speed-\nup"),
        Column("publ.", profiled.published_speed_up, ratio).of(here),
    ]
    notes = [
        "the rows like the published once more, in the balance that suited the published machine; speed-ups as above",
        *rows.about_emulation(),
        *rows.problems(),
    ]
    return rows.table(": what the published balance is worth here", columns, notes)


def _utilization(rows: Rows) -> Table:
    columns = [
        ROW,
        Column(
            "each device",
            lambda x: x.values.get("utilization") or None,
            partial(in_lines, form="{:.0%}"),
            "-",
        ),
        replace(BUSY, heading="mean", nothing="-"),
        Column("bubble", lambda each: each.values["bubble"], "{:.0%}"),
    ]
    notes = [
        *rows.what_busy_is(),
        "bubble: share of the devices' time, from a step's first task to its last, in which they waited",
        "of one step of each row",
    ]
    return rows.table(
        f": how busy the {'emulated ' if rows.emulated else ''}devices were", columns, notes
    )


def zoo_table(experiment: Experiment, results: Sequence[Result]) -> Table:
    """Return the table of all models so far. Its group is that of the last model."""
    rows = Rows(experiment, results)
    plain = Rows(experiment, [each for each in rows if each.config["partitions"] is None])
    measured = Column("samples/s\nmeasured", speed, number)
    columns: list[Column[Result]] = [
        Column("model", lambda plain: plain.config["model"].rpartition(":")[2], left=True),
        measured.of(lambda plain: rows.measured(plain.row)) if rows.emulated else measured,
    ]
    for n in sorted({each.config["partitions"] for each in rows} - {None}):
        columns += _gains(rows, n)
    return replace(plain.table("", columns, _notes(rows)), group=str(results[-1].config["model"]))


def _gains(rows: Rows, n: int) -> Iterator[Column[Result]]:
    found = {
        (x.config["model"], x.config["configuration"]): x
        for x in rows
        if x.config["partitions"] == n
    }

    def row(configuration: str) -> Callable[[Result], Result | None]:
        return lambda plain: found.get((plain.config["model"], configuration))

    def gain(result: Result) -> object:
        return rows.speed_up(result) or outcome(result)

    yield Column(f"n={n}\nplan", gain, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nmeasured", rows.measured_speed_up, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nequal", gain, ratio).of(row(EQUAL_LAYERS))


def _notes(rows: Rows) -> Iterator[str]:
    yield rows.circumstances()
    how = {
        (each.config["chunks"], each.config["checkpoint"])
        for each in rows
        if each.config["chunks"] is not None
    }
    yield from (
        f"n: speed-up of n devices over plain training on one, taken round by round; m={m}, checkpoint {mode}"
        for m, mode in sorted(how)
    )
    yield (
        "plan: in the balance of torchgpipe.plan, by a profile of the layers on this machine; equal: with equally many "
        "layers in each partition"
    )
    yield "nobody has published these rows"
    yield from rows.about_emulation(ratio=False)
    yield from rows.problems()
