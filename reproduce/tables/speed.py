"""Make the tables of speed experiments and of the ablation.

The tables show the throughput and the speed-up of each row (configuration), and beside them the
published numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reproduce.experiments.row import (
    CHANGED,
    COMPONENTS,
    EQUAL_LAYERS,
    PLANNED,
    PUBLISHED_BALANCE,
    Experiment,
)
from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import outcome
from reproduce.records.record import Result
from reproduce.tables.emulated import ONE_THREAD, about_one_thread
from reproduce.tables.layout import Column, GiB, Table, in_lines, number, ratio
from reproduce.tables.rows import BUSY, ROW, Rows, config, is_published, speed

SMALLER = "n and m as published, with a smaller model and batch: compare the shape, not the numbers"
OF_ROUNDS = (
    "A speed-up is computed for each round, and the table has the median. So it can differ from "
    "the ratio of two samples/s, which are medians, too."
)
UNORDERED = (
    "without the dependency nothing asks for a recomputation before its gradient is there; without "
    "streams of their own, copies run among the tasks of both sides; without portals, skips go "
    "through every partition on their way"
)
Results = Sequence[Result]


def speed_tables(experiment: Experiment, results: Results) -> list[Table]:
    """Return the tables of a speed experiment: one for each group, and one about utilization.

    A group consists of the rows (configurations) that are compared with each other. In an
    experiment in which each model is a group, return a single table of all models instead.
    """
    if results[0].config.get("equal") == "model":
        return [zoo_table(experiment, results)]
    reproducing = [result for result in results if result.published]
    tables = []
    for group, chosen in grouped(results, _group).items():
        rows = Rows(experiment, chosen)
        if group == PUBLISHED_BALANCE:
            table = _balances(rows, Rows(experiment, reproducing))
        elif group == CHANGED:
            table = _changed(rows)
        elif is_published(chosen[0]):
            table = _as_published(rows)
        else:
            table = _ours(group, rows)
        tables.append(replace(table, group=group))
    observed = [result for result in results if "bubble" in result.values]
    if observed:
        table = _utilization(Rows(experiment, observed))
        tables.append(replace(table, group="utilization"))
    return tables


def _group(result: Result) -> str:
    """Return the name of a row's group: the rows that are compared with it in one table."""
    group = result.config.get("group")
    if group is not None:
        return str(group)
    # The record comes from a version of this program that did not record the group. If the row
    # reproduces a published row, its field `configuration` names the group. For any other row, the
    # field `equal` does. Without this field, the rows had equal batch sizes: the group "batch".
    if is_published(result):
        return str(result.config["configuration"])
    return str(result.config.get("equal") or "batch")


def ablation_tables(experiment: Experiment, results: Results) -> list[Table]:
    """Return a list with the table of an ablation.

    In an ablation, each row switches on one more component of the pipeline than the row before.
    """
    rows = Rows(experiment, results)
    reserved = any("peak_reserved" in result.values for result in rows)
    kind = "reserved" if reserved else "live"

    def switches(result: Result) -> str:
        switched_on = result.config["components"]
        marks = ["x" if part in switched_on else "-" for part in COMPONENTS]
        return "".join(marks)

    def peak(result: Result) -> float | None:
        values = result.values
        peaks = values.get("peak_reserved") or values.get("peak_allocated") or []
        return sum(peaks) / GiB or None

    columns = [
        ROW,
        Column("dsp", switches),
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
        f"dsp: dependency, streams, portals; x where it is on. Speed-ups are over the first row. "
        f"{OF_ROUNDS}",
    ]
    if any(map(rows.paper, rows)):
        notes.append(f"published on {rows.published_on}: U-Net (5, 64), reserved memory")
    notes.append(UNORDERED)
    notes += rows.about_emulation()
    notes += rows.what_busy_is()
    notes += rows.problems()
    return [rows.table(rows.published_title, columns, notes)]


def _ours(equal: str, rows: Rows) -> Table:
    partitions = {config["partitions"] for config in rows.configs} - {1}
    smallest = min(partitions, default=2)
    columns = [
        Column("configuration", _configuration, left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        Column("over naive\nmeasured", rows.measured_speed_up, ratio),
        rows.throughput(),
        rows.over("over naive", quartiles=True),
        Column("emul./\nmeas.", rows.emulated_over_measured, ratio),
    ]
    notes = [
        rows.circumstances(),
        "nobody has published these rows: they are ours, to tell pipelining from larger batches",
        f"Speed-ups are over the naive row of the same n (checkpoint-only: of n={smallest}). "
        f"{OF_ROUNDS}",
    ]
    if equal == "micro-batch":
        size = rows.span("micro_batch_size")
        notes.append(f"micro-batch size {size}, so the batch size is {size} x m")
    notes.append(
        "small micro-batches may be faster or slower by themselves: checkpoint-only shows by how "
        "much"
    )
    notes += rows.about_emulation()
    notes += rows.problems()
    return rows.table(f", ours at equal {equal} size", columns, notes)


def _configuration(result: Result) -> str:
    return str(result.config["configuration"])


def _as_published(rows: Rows) -> Table:
    modes = set()
    baselines: dict[str, None] = {}
    for result in rows:
        if result.config["chunks"] is not None:
            modes.add(result.config["checkpoint"])
        if result.over:
            baselines[result.over] = None
    setting = config("checkpoint", "checkpoint")
    if len(modes) == 1:
        setting = config("m", "chunks")
    # In a table with emulated rows, there is no room for both quartiles and the published column.
    quartiles = not (rows.emulated and any(map(rows.published_throughput, rows)))
    columns = [
        ROW,
        config("batch", "batch_size"),
        setting,
        Column("speed-up\nmeasured", rows.measured_speed_up, ratio),
        rows.throughput(),
        Column("publ.", rows.published_throughput, number),
        rows.over("speed-up", quartiles),
        Column("publ.", rows.published_speed_up, ratio),
        Column("emul./\nmeas.", rows.emulated_over_measured, ratio),
    ]
    notes = [rows.circumstances()]
    if "like" in rows.published_title:
        notes.append(SMALLER)
    notes.append(f"Speed-ups are over {', '.join(baselines)}. {OF_ROUNDS}")
    notes += rows.about_emulation()
    notes.append(rows.about_publication())
    notes += rows.problems()
    return rows.table(rows.published_title, columns, notes)


def _changed(rows: Rows) -> Table:
    """Make the table of rows whose settings the user has changed with the option `--set`."""

    def name(result: Result) -> str:
        settings = result.row.removeprefix(f"{result.config['changed_from']} ").split(" ")
        return "\n".join([str(result.config["changed_from"]), *settings])

    columns = [
        Column("row, and what\nis changed", name, left=True),
        config("n", "partitions"),
        config("m", "chunks"),
        config("batch", "batch_size"),
        config("checkpoint", "checkpoint"),
        Column("speed-up\nmeasured", rows.measured_speed_up, ratio),
        rows.throughput(),
        rows.over("speed-up"),
        Column("emul./\nmeas.", rows.emulated_over_measured, ratio),
    ]
    notes = [
        rows.circumstances(),
        "changed by --set: these rows are not those of the same name, or the published ones",
    ]
    baselines = {result.over for result in rows if result.over}
    if baselines:
        notes.append(f"Speed-ups are over {', '.join(sorted(baselines))}. {OF_ROUNDS}")
    notes += rows.about_emulation()
    notes += rows.problems()
    return rows.table(", changed rows", columns, notes)


def _balances(rows: Rows, profiled: Rows) -> Table:
    """Make the table that compares the published balances with balances from a profile.

    A balance is the number of layers of each partition.

    Args:
        rows: The rows that ran with the published balance.
        profiled: The same rows with the balance that was found by profiling on this machine.
    """

    def name(result: Result) -> str:
        return result.row.partition("/")[0]

    def here(result: Result) -> Result | None:
        return profiled.named(name(result))

    def balance(result: Result) -> str:
        return in_lines(result.config["balance"] or (), "{}", gap=" ")

    columns = [
        Column("row", name, left=True),
        Column("profiled here", balance, left=True).of(here),
        profiled.over("speed-\nup").of(here),
        Column("published balance", balance),
        profiled.over("speed-\nup"),
        Column("publ.", profiled.published_speed_up, ratio).of(here),
    ]
    notes = [
        "the rows like the published once more, in the balance that suited the published machine; "
        "speed-ups: ratios of medians",
        *rows.about_emulation(),
        *rows.problems(),
    ]
    return rows.table(": what the published balance is worth here", columns, notes)


def _utilization(rows: Rows) -> Table:
    def of_each_device(result: Result) -> object:
        return result.values.get("utilization") or None

    def bubble(result: Result) -> object:
        return result.values["bubble"]

    def in_percent(shares: Sequence[float]) -> str:
        return in_lines(shares, "{:.0%}")

    columns = [
        ROW,
        Column("each device", of_each_device, in_percent, "-"),
        replace(BUSY, heading="mean", nothing="-"),
        Column("bubble", bubble, "{:.0%}"),
        ONE_THREAD,
    ]
    notes = [
        *rows.what_busy_is(),
        "bubble: share of the devices' time, from a step's first task to its last, in which they "
        "waited",
        "of one step of each row",
        *about_one_thread(rows),
    ]
    devices = "emulated devices" if rows.emulated else "devices"
    return rows.table(f": how busy the {devices} were", columns, notes)


def zoo_table(experiment: Experiment, results: Results) -> Table:
    """Return the table of all models that have run so far, in an experiment on many models.

    The rows (configurations) of a model form a group. The table gets the name of the last model's
    group, so that the table is shown when this model has run.
    """
    rows = Rows(experiment, results)
    plain = []
    partitions = set()
    for result in rows:
        n = result.config["partitions"]
        if n is None:
            plain.append(result)
        else:
            partitions.add(n)

    def model(result: Result) -> str:
        return str(result.config["model"].rpartition(":")[2])

    def measured(result: Result) -> Result | None:
        return rows.measured(result.row) if rows.emulated else result

    columns = [
        Column("model", model, left=True),
        Column("samples/s\nmeasured", speed, number).of(measured),
    ]
    for n in sorted(partitions):
        columns += _gains(rows, n)
    table = Rows(experiment, plain).table("", columns, _zoo_notes(rows))
    return replace(table, group=str(results[-1].config["model"]))


def _gains(rows: Rows, n: int) -> Iterator[Column[Result]]:
    """Yield the columns of speed-ups on n devices, with planned and with equal balances."""
    found = {}
    for result in rows:
        if result.config["partitions"] == n:
            model = result.config["model"]
            found[model, result.config["configuration"]] = result

    def row(configuration: str) -> Callable[[Result], Result | None]:
        return lambda plain: found.get((plain.config["model"], configuration))

    def gain(result: Result) -> object:
        return rows.speed_up(result) or outcome(result)

    yield Column(f"n={n}\nmeasured", rows.measured_speed_up, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nplan", gain, ratio).of(row(PLANNED))
    yield Column(f"n={n}\nequal", gain, ratio).of(row(EQUAL_LAYERS))


def _zoo_notes(rows: Rows) -> Iterator[str]:
    yield rows.circumstances()
    settings = set()
    for result in rows:
        if result.config["chunks"] is not None:
            settings.add((result.config["chunks"], result.config["checkpoint"]))
    for m, mode in sorted(settings):
        yield (
            "The columns n=... have the speed-up of n devices over plain training on one, computed "
            f"in each round, with m={m} micro-batches and checkpoint {mode}."
        )
    yield (
        "For plan, torchgpipe.plan chose the balance by a profile of the layers on this machine. "
        "For equal, each partition has equally many layers."
    )
    yield "Nobody has published these rows."
    yield from rows.about_emulation(ratio=False)
    yield from rows.problems()
