"""Plan and run an experiment of any kind: on speed, on memory, on accuracy, or an ablation."""

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
    """How one kind of experiment, such as those on speed, is planned and run."""

    plan: Callable[[Session], None]
    run: Callable[[Session], Iterator[GroupDone]]


def plan(session: Session) -> None:
    """Tell the progress display which steps will run, and prepare the record.

    Until a row has run, the record says that the row was interrupted. So the record stays right if
    the run is ended.
    """
    WAYS[session.experiment.measures].plan(session)


def run_experiment(session: Session) -> Iterator[GroupDone]:
    """Run every row of an experiment, even if some rows fail.

    When the table of a group of rows can be shown, yield the name of the group, and whether the
    group is finished.
    """
    way = WAYS[session.experiment.measures]
    with session.devices.in_use():
        yield from way.run(session)


def _plan_ablation(session: Session) -> None:
    """Plan the steps that are timed, and the steps that measure memory."""
    plan_speed(session)
    for row in session.scale.rows:
        plan_peak(session, row, MEMORY_STEPS, _memory_job(row))


def _memory_job(row: Row) -> str:
    """Return the name of the job that measures a row's memory, in the progress display."""
    return f"{row.name}, memory"


def _run_ablation(session: Session) -> Iterator[GroupDone]:
    """Time all rows of an ablation like those of a speed experiment, then measure their memory."""
    for _, done in run_speed(session):
        if done:
            rows = session.scale.rows
            for number, row in enumerate(rows, 1):
                _add_memory(session, row, f"row {number} of {len(rows)}: {row.name}")
                session.progress.stop()
        yield "", done


def _add_memory(session: Session, row: Row, which: str) -> None:
    """Measure a row's peak memory, and add it to the row's results, if the row could be timed.

    If the measurement fails, add the reason instead. `which` names the row in the progress display.
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
