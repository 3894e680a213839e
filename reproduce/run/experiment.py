"""Run an experiment in the way that suits what it measures."""

from __future__ import annotations

from reproduce.run.accuracy.run import plan_accuracy, run_accuracy
from reproduce.run.failure import explain
from reproduce.run.memory import measure_memory, plan_memory, run_memory
from reproduce.run.session import Session
from reproduce.run.speed import plan_speed, run_speed

MEMORY_STEPS = 2  # of an ablation's rows: an optimizer makes its state at the end of the first


def plan(session: Session) -> None:
    """Tell the progress display what is to come."""
    WAYS[session.experiment.measures][0](session)


def run_experiment(session: Session) -> None:
    """Run every row; whatever becomes of one, the others go on."""
    with session.devices.in_use():
        WAYS[session.experiment.measures][1](session)
    for row in session.scale.rows:
        session.progress.drop(session.job(row))


def run_ablation(session: Session) -> None:
    """Time every row as a speed experiment does, then measure each one's peak memory; one without says why."""
    run_speed(session)
    for row in session.scale.rows:
        if session.recorded(row).status == "measured":
            try:
                _, values = measure_memory(session, row, MEMORY_STEPS)
            except Exception as error:
                values = {"memory_problem": explain(error).reason}
            session.add_values(row, values)
            session.progress.stop()


WAYS = {  # what is measured -> how to plan, how to run
    "speed": (plan_speed, run_speed),
    "memory": (plan_memory, run_memory),
    "ablation": (plan_speed, run_ablation),
    "accuracy": (plan_accuracy, run_accuracy),
}
