"""Run an experiment in the way that suits what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from reproduce.run.ablation import run_ablation
from reproduce.run.accuracy.run import plan_accuracy, run_accuracy
from reproduce.run.memory import plan_memory, run_memory
from reproduce.run.session import Session
from reproduce.run.speed import plan_speed, run_speed


class Way(NamedTuple):
    """Say how to tell the progress display what is to come, and how to run."""

    plan: Callable[[Session], None]
    run: Callable[[Session], None]


WAYS = {
    "speed": Way(plan_speed, run_speed),
    "memory": Way(plan_memory, run_memory),
    "ablation": Way(plan_speed, run_ablation),
    "accuracy": Way(plan_accuracy, run_accuracy),
}


def plan(session: Session) -> None:
    """Tell the progress display what is to come."""
    WAYS[session.experiment.measures].plan(session)


def run_experiment(session: Session) -> None:
    """Run every row; whatever becomes of one, the others go on."""
    with session.devices.in_use():
        WAYS[session.experiment.measures].run(session)
    for row in session.scale.rows:
        session.progress.drop(session.job(row))
