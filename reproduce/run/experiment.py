"""Run an experiment in the way that suits what it measures."""

from collections.abc import Iterator

from reproduce.records.record import SUCCESS
from reproduce.run.accuracy.run import plan_accuracy, run_accuracy
from reproduce.run.failure import explain
from reproduce.run.peak import measure_memory, plan_memory, run_memory
from reproduce.run.session import Session
from reproduce.run.speed import plan_speed, run_speed

MEMORY_STEPS = 2  # of an ablation: an optimizer allocates its state at the end of the first step


def plan(session: Session) -> None:
    """Tell the progress display what is to come, and record it as interrupted, which holds until it has run."""
    WAYS[session.experiment.measures][0](session)


def run_experiment(session: Session) -> Iterator[tuple[str, bool]]:
    """Run every row, even if others fail. Yield a group's name when its table can be shown, and whether it is done."""
    with session.devices.in_use():
        yield from WAYS[session.experiment.measures][1](session)


def _ablation(session: Session) -> Iterator[tuple[str, bool]]:
    """Time every row as a speed experiment does, then measure its peak memory, or record why it has none."""
    for _, done in run_speed(session):
        for row in session.scale.rows if done else ():
            kinds = [
                kind
                for kind in (False, True)
                if session.recorded(row, emulated=kind).status in SUCCESS
            ]
            try:
                values = measure_memory(session, row, MEMORY_STEPS)[1] if kinds else {}
            except Exception as error:
                values = {"memory_problem": explain(error).reason}
            for kind in kinds:
                session.add_values(row, values, emulated=kind)
            session.progress.stop()
        yield "", done


WAYS = {  # what is measured -> how to plan, how to run
    "speed": (plan_speed, run_speed),
    "memory": (plan_memory, run_memory),
    "ablation": (plan_speed, _ablation),
    "accuracy": (plan_accuracy, run_accuracy),
}
