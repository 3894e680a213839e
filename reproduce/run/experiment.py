"""Plan and run an experiment of any kind: on speed, memory or accuracy, or an ablation."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from reproduce.experiments.row import Row
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS
from reproduce.run.accuracy import plan_accuracy, run_accuracy
from reproduce.run.engines.failure import explain
from reproduce.run.groups import plan_speed
from reproduce.run.peak import measure_memory, plan_memory, plan_peak, run_memory
from reproduce.run.session import GroupDone, Session
from reproduce.run.speed import run_speed

MEMORY_STEPS = 2  # an optimizer allocates its state at the end of the first step


class Way(NamedTuple):
    """The two functions that plan and run one kind of experiment, such as speed experiments."""

    plan: Callable[[Session], None]
    run: Callable[[Session], Iterator[GroupDone]]


def plan(session: Session) -> None:
    """Tell the progress display which steps will run, and add all rows that will run to the record.

    A row is a configuration, and the record is the file of results. At first, these rows have the
    status "interrupted" there. So the record is right even if this process is killed before it runs
    a row.
    """
    WAYS[session.experiment.measures].plan(session)


def run_experiment(session: Session) -> Iterator[GroupDone]:
    """Run every row (configuration) of an experiment, even if some rows fail.

    Rows that are compared with each other form a group, and share a table. When a group's table can
    be shown, yield a pair: the name of the group, and whether all of its rows are finished.
    """
    way = WAYS[session.experiment.measures]
    with session.devices.in_use():
        yield from way.run(session)


def _plan_ablation(session: Session) -> None:
    """Plan the steps of an ablation: steps that are timed, and steps that measure memory."""
    plan_speed(session)
    for row in session.scale.rows:
        plan_peak(session, row, MEMORY_STEPS, _memory_job(row))


def _memory_job(row: Row) -> str:
    """Return the progress display's name for the steps that measure the memory of a row."""
    return f"{row.name}, memory"


def _run_ablation(session: Session) -> Iterator[GroupDone]:
    """Run an ablation: time all rows as in a speed experiment, then measure their memory."""
    for _, done in run_speed(session):
        if done:
            rows = session.scale.rows
            for number, row in enumerate(rows, 1):
                _add_memory(session, row, f"row {number} of {len(rows)}: {row.name}")
                session.progress.stop()
        yield "", done


def _add_memory(session: Session, row: Row, which: str) -> None:
    """Measure the peak memory of a row, and add it to the row's results.

    If the measurement fails, add the reason instead. Do not measure the memory of a row that could
    not be timed. `which` is the name of the row in the progress display.
    """
    timed = []
    for emulated in (False, True):
        found = session.found(row, emulated=emulated)
        if found is not None and found.status in SUCCESS:
            timed.append(emulated)
    job = _memory_job(row)
    if not timed:
        session.finish(job)
        return
    values: dict[str, Json]
    try:
        _, values = measure_memory(session, row, MEMORY_STEPS, job, which)
    except Exception as error:
        values = {"memory_problem": explain(error).reason}
    session.finish(job)
    for emulated in timed:
        session.add_values(row, values, emulated=emulated)


WAYS = {  # by what an experiment measures
    "speed": Way(plan_speed, run_speed),
    "memory": Way(plan_memory, run_memory),
    "ablation": Way(_plan_ablation, _run_ablation),
    "accuracy": Way(plan_accuracy, run_accuracy),
}
