"""Run an ablation: time every row as a speed experiment does, then measure each one's peak memory, one at a time."""

from __future__ import annotations

from reproduce.experiments import Experiment, Row
from reproduce.run.failure import explain
from reproduce.run.memory import model_values
from reproduce.run.peak import Peak, measure_peak
from reproduce.run.session import Runner
from reproduce.run.speed import run_speed
from reproduce.run.training import FakeData

__all__ = ["run_ablation"]

MEMORY_STEPS = 2  # an optimizer makes its state at the end of the first


def run_ablation(runner: Runner, experiment: Experiment) -> None:
    """Put down speed, utilization and memory of every row; a row without memory says why."""
    run_speed(runner, experiment)
    for row in experiment.scale(runner.scale).rows:
        if not runner.was_measured(experiment, row.name):
            continue
        runner.free()
        try:
            peak = _measure(runner, experiment, row)
        except Exception as error:
            runner.add_values(experiment, row.name, memory_problem=explain(error).reason)
        else:
            values = {"peak_allocated": peak.allocated, "peak_reserved": peak.reserved}
            found = {name: value for name, value in values.items() if value is not None}
            runner.add_values(experiment, row.name, **model_values(row), **found)
        finally:
            runner.progress.stop()


def _measure(runner: Runner, experiment: Experiment, row: Row) -> Peak:
    training = runner.build(experiment, row, FakeData([row], runner.seed))

    def before(step: int) -> None:
        runner.start(experiment, row.name, f"memory of {row.name}, step {step + 1} of {MEMORY_STEPS}")

    return measure_peak(training, runner.devices, steps=MEMORY_STEPS, before=before)
