"""Run an experiment of any kind: on speed, on memory, on accuracy, or an ablation."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from reproduce.experiments.row import Row
from reproduce.records.places import Json
from reproduce.records.record import SUCCESS
from reproduce.run.accuracy.run import plan_accuracy, run_accuracy
from reproduce.run.failure import explain
from reproduce.run.peak import measure_memory, plan_memory, run_memory
from reproduce.run.session import GroupDone, Session
from reproduce.run.speed import plan_speed, run_speed

MEMORY_STEPS = 2  # an optimizer allocates its state at the end of the first step


class Way(NamedTuple):
    """The two functions that plan and run the experiments that measure one kind of quantity."""

    plan: Callable[[Session], None]
    run: Callable[[Session], Iterator[GroupDone]]


def plan(session: Session) -> None:
    """Tell the progress display which steps will run.

    Every row that will run is recorded as interrupted until it has run.
    """
    WAYS[session.experiment.measures].plan(session)


def run_experiment(session: Session) -> Iterator[GroupDone]:
    """Run every row of an experiment, even if some rows fail.

    Yield a group's name when its table can be shown, and whether the group is finished.
    """
    way = WAYS[session.experiment.measures]
    with session.devices.in_use():
        yield from way.run(session)


def _run_ablation(session: Session) -> Iterator[GroupDone]:
    """Run an ablation: time every row like a speed experiment, then measure its peak memory."""
    for _, done in run_speed(session):
        if done:
            for row in session.scale.rows:
                _add_memory(session, row)
                session.progress.stop()
        yield "", done


def _add_memory(session: Session, row: Row) -> None:
    """Add a row's peak memory, or the reason why it is not known, to its results with times."""
    timed = []
    for emulated in (False, True):
        result = session.recorded(row, emulated=emulated)
        if result.status in SUCCESS:
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
