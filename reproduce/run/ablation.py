"""Run an ablation: time every row as a speed experiment does, then measure each one's peak memory, one at a time."""

from __future__ import annotations

from reproduce.run.failure import explain
from reproduce.run.memory import measure_memory
from reproduce.run.session import Session
from reproduce.run.speed import run_speed

MEMORY_STEPS = 2  # an optimizer makes its state at the end of the first


def run_ablation(session: Session) -> None:
    """Record speed, utilization and memory of every row; a row without memory says why."""
    run_speed(session)
    for row in session.scale.rows:
        if session.recorded(row).status == "measured":
            try:
                _, values = measure_memory(session, row, MEMORY_STEPS)
            except Exception as error:
                values = {"memory_problem": explain(error).reason}
            session.add_values(row, values)
            session.progress.stop()
