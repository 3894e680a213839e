"""Make the table of rows that were measured by several engines: samples per second, and how many times `threads`'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from reproduce.experiments import Experiment
from reproduce.numbers.metrics import outcome, speed_up
from reproduce.records.record import Engine, Result
from reproduce.tables.layout import Column, Table, many, table
from reproduce.tables.rows import speed_text
from reproduce.tables.text import ratio

GROUP = "engines"
WHAT = {
    "threads": "threads: GPipe, a thread for each partition of one process",
    "ranks": "ranks: DistributedGPipe, a process for each partition",
    "ScheduleGPipe": "ScheduleGPipe, Schedule1F1B: PyTorch's own schedules, a process for each partition; where tasks "
    "are checkpointed, torch.utils.checkpoint does it",
}


def engines_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table, where there are devices for any row of another engine than `threads`."""
    measured = [result for result in results if not result.emulated]
    engines: list[Engine] = list(dict.fromkeys(result.engine for result in measured))
    if engines in ([], ["threads"]):
        return []
    rows: dict[str, dict[Engine, Result]] = {}
    for result in measured:
        rows.setdefault(result.row, {})[result.engine] = result
    run = {row: found for row, found in rows.items() if any(each.status != "needs devices" for each in found.values())}

    def samples(engine: Engine) -> Column[str]:
        def cell(row: str) -> str | None:
            result = run[row].get(engine)
            return None if result is None else speed_text(result) or outcome(result).replace("not run", "-")

        return Column(engine.replace("Schedule", "Schedule\n"), cell)

    def over_threads(engine: Engine) -> Column[str]:
        def cell(row: str) -> str | None:
            times = speed_up(run[row].get(engine), run[row].get("threads"))
            return None if times is None else ratio(times.middle)

        return Column("over\nthreads", cell)

    columns: list[Column[str]] = [Column("row", str, left=True)]
    for engine in sorted(engines, key=get_args(Engine).index):
        columns += [samples(engine), over_threads(engine)][: 1 if engine == "threads" else 2]
    reasons: dict[str, list[Result]] = {}
    for result in measured:
        if result.reason and result.status != "needs devices":
            reasons.setdefault(result.reason, []).append(result)
    notes = [
        *(text for engine, text in WHAT.items() if engine in engines),
        "over threads: the median over rounds, in which each engine does a step" if "threads" in engines else None,
        *(f"{_names(found, 'engine')}: {reason} ({_names(found, 'row')})" for reason, found in reasons.items()),
        f"{many(len(rows) - len(run), 'row')} not run for want of devices" if len(run) < len(rows) else None,
    ]
    made = table(f"{experiment.title}: samples/s of each engine", columns, run, notes)
    return [replace(made, group=GROUP)] if run else []


def _names(results: Sequence[Result], of: str) -> str:
    return ", ".join(dict.fromkeys(getattr(result, of) for result in results))
