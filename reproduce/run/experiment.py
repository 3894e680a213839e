"""Plan and run an experiment of any kind: on speed, on memory, on accuracy, or an ablation."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from reproduce.experiments.row import Row
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS
from reproduce.run.accuracy import plan_accuracy, run_accuracy
from reproduce.run.engines.failure import explain
from reproduce.run.peak import measure_memory, plan_memory, run_memory
from reproduce.run.session import GroupDone, Session
from reproduce.run.speed import plan_speed, run_speed

MEMORY_STEPS = 2  # an optimizer allocates its state at the end of the first step


class Way(NamedTuple):
    """How one kind of experiment, such as those on speed, is planned and run."""

    plan: Callable[[Session], None]
    run: Callable[[Session], Iterator[GroupDone]]


def plan(session: Session) -> None:
    """Tell the progress display which steps will run, and prepare the record.

    The record says that every row that will run was interrupted. It does so until the row has run.
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


def _run_ablation(session: Session) -> Iterator[GroupDone]:
    """Time all rows of an ablation like those of a speed experiment, then measure their memory."""
    for _, done in run_speed(session):
        if done:
            for row in session.scale.rows:
                _add_memory(session, row)
                session.progress.stop()
        yield "", done


def _add_memory(session: Session, row: Row) -> None:
    """Measure a row's peak memory, and add it to the row's results, if the row could be timed.

    If the measurement fails, add the reason instead.
    """
    timed = []
    for emulated in (False, True):
        found = session.found(row, emulated=emulated)
        if found is not None and found.status in SUCCESS:
            timed.append(emulated)
    if not timed:
        return
    values: dict[str, Json]
    try:
        _, values = measure_memory(session, row, MEMORY_STEPS)
    except Exception as error:
        values = {"memory_problem": explain(error).reason}
    for emulated in timed:
        session.add_values(row, values, emulated=emulated)


WAYS = {  # by what an experiment measures
    "speed": Way(plan_speed, run_speed),
    "memory": Way(plan_memory, run_memory),
    "ablation": Way(plan_speed, _run_ablation),
    "accuracy": Way(plan_accuracy, run_accuracy),
}
