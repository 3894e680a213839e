"""Make the table that compares engines on the same rows (configurations).

An engine is a way to run the partitions of a pipeline in parallel, for example by threads. The
table has the samples per second of each engine, and the ratio of this number to the number of the
engine `threads`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from reproduce.experiments.row import Experiment
from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import Reading, outcome, speed_up, throughput
from reproduce.records.record import Engine, Result
from reproduce.tables.layout import Column, Table, many, number, ratio, table

GROUP = "engines"
WHAT = {
    "threads": "threads: GPipe, a thread for each partition of one process",
    "ranks": "ranks: DistributedGPipe, a process for each partition",
    "ScheduleGPipe": "ScheduleGPipe, Schedule1F1B: PyTorch's own schedules, a process for each "
    "partition; where tasks are checkpointed, torch.utils.checkpoint does it",
}
ByEngine = Mapping[Engine, Result]  # a row's result with each engine
ENGINES: tuple[Engine, ...] = get_args(Engine)


def engines_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return a list with the table that compares engines (ways to run partitions in parallel).

    The list is empty if only the engine `threads` was used, or if no row (configuration) could be
    measured, because each row needs more devices than the machine has.
    """
    used: set[Engine] = set()
    rows: dict[str, dict[Engine, Result]] = {}
    left_out: list[Result] = []
    for result in results:
        if result.emulated:
            continue
        used.add(result.engine)
        rows.setdefault(result.row, {})[result.engine] = result
        if result.reason and result.status != "needs devices":
            left_out.append(result)
    run = list(filter(_had_devices, rows.values()))
    if used == {"threads"} or not run:
        return []
    engines = sorted(used, key=ENGINES.index)
    columns = [Column[ByEngine]("row", _name, left=True)]
    notes = []
    for engine in engines:
        columns += _columns(engine)
        if engine in WHAT:
            notes.append(WHAT[engine])
    if "threads" in used:
        notes.append("over threads: the median over rounds, in which each engine does a step")
    notes += _about_left_out(left_out)
    lacking = len(rows) - len(run)
    if lacking:
        notes.append(f"{many(lacking, 'row')} not run for want of devices")
    title = f"{experiment.title}: samples/s of each engine"
    made = table(title, columns, run, notes)
    return [replace(made, group=GROUP)]


def _about_left_out(results: Sequence[Result]) -> Iterator[str]:
    """Yield a note for each reason why an engine did not run a row (a configuration).

    The note names the engines and the rows to which the reason applies.
    """
    for reason, found in grouped(results, lambda result: result.reason).items():
        engines: dict[str, None] = {}
        rows: dict[str, None] = {}
        for result in found:
            engines[result.engine] = None
            rows[result.row] = None
        yield f"{', '.join(engines)}: {reason} ({', '.join(rows)})"


def _had_devices(row: ByEngine) -> bool:
    return any(result.status != "needs devices" for result in row.values())


def _name(row: ByEngine) -> str:
    first = next(iter(row.values()))
    return first.row


def _columns(engine: Engine) -> list[Column[ByEngine]]:
    """Return the columns of an engine: its samples/s, and their ratio to the engine `threads`.

    For the engine `threads` itself, there is no column of ratios.
    """

    def samples(row: ByEngine) -> Reading | str | None:
        result = row.get(engine)
        if result is None:
            return None
        return throughput(result) or outcome(result).replace("not run", "-")

    def over_threads(row: ByEngine) -> Reading | None:
        return speed_up(row.get(engine), row.get("threads"))

    heading = engine.replace("Schedule", "Schedule\n")
    columns = [Column(heading, samples, number)]
    if engine != "threads":
        columns.append(Column("over\nthreads", over_threads, ratio))
    return columns
