"""Make the table of rows that several engines ran: samples per second, and their ratio to those of `threads`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import get_args

from reproduce.experiments.row import Experiment
from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import outcome, speed_up, throughput
from reproduce.records.record import Engine, Result
from reproduce.tables.layout import Column, Table, many, number, ratio, table

GROUP = "engines"
WHAT = {
    "threads": "threads: GPipe, a thread for each partition of one process",
    "ranks": "ranks: DistributedGPipe, a process for each partition",
    "ScheduleGPipe": "ScheduleGPipe, Schedule1F1B: PyTorch's own schedules, a process for each partition; where tasks "
    "are checkpointed, torch.utils.checkpoint does it",
}
Found = Mapping[Engine, Result]  # a row's result with each engine


def engines_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table; none if only `threads` was used, or if no row had enough devices."""
    measured = [result for result in results if not result.emulated]
    engines = sorted({result.engine for result in measured}, key=get_args(Engine).index)
    rows = {
        row: {each.engine: each for each in found}
        for row, found in grouped(measured, lambda x: x.row).items()
    }
    run = [
        found
        for found in rows.values()
        if any(each.status != "needs devices" for each in found.values())
    ]
    if engines == ["threads"] or not run:
        return []
    columns = [Column[Found]("row", lambda found: next(iter(found.values())).row, left=True)]
    for engine in engines:
        samples = Column[Result](
            engine.replace("Schedule", "Schedule\n"),
            lambda result: throughput(result) or outcome(result).replace("not run", "-"),
            number,
        )
        columns.append(samples.of(methodcaller("get", engine)))
        if engine != "threads":
            over = partial(
                lambda engine, found: speed_up(found.get(engine), found.get("threads")), engine
            )
            columns.append(Column("over\nthreads", over, ratio))
    left_out = [result for result in measured if result.reason and result.status != "needs devices"]
    reasons = grouped(left_out, lambda each: each.reason)
    notes = [
        *(text for engine, text in WHAT.items() if engine in engines),
        "over threads: the median over rounds, in which each engine does a step"
        if "threads" in engines
        else None,
        *(
            f"{_names(found, 'engine')}: {reason} ({_names(found, 'row')})"
            for reason, found in reasons.items()
        ),
        f"{many(len(rows) - len(run), 'row')} not run for want of devices"
        if len(run) < len(rows)
        else None,
    ]
    made = table(f"{experiment.title}: samples/s of each engine", columns, run, notes)
    return [replace(made, group=GROUP)]


def _names(results: Sequence[Result], of: str) -> str:
    return ", ".join(dict.fromkeys(getattr(result, of) for result in results))
