"""Run a memory experiment: count the published models' parameters, then measure every row's peak, one at a time."""

from __future__ import annotations

from msgspec.structs import replace

from reproduce.experiments import Experiment, Row
from reproduce.run.failure import explain
from reproduce.run.peak import Peak, measure_peak
from reproduce.run.session import Runner
from reproduce.run.training import FakeData, count_parameters

__all__ = ["run_memory"]

FLOAT_BYTES = 4


def run_memory(runner: Runner, experiment: Experiment) -> None:
    """Put down sizes and peaks, whatever becomes of each row."""
    on_meta = runner.devices.kind == "meta"  # there the rows themselves are of the published size
    for row in () if on_meta else experiment.scale("paper").rows:
        runner.start(experiment, "", f"counting the parameters of {row.name}")
        result = runner.result(experiment, row, scale="paper", device="meta")
        runner.recorder.put(replace(result, values=model_values(row)))

    for row in runner.runnable(experiment):
        runner.free()
        try:
            used, peak = _measure(runner, experiment, row)
        except Exception as error:
            runner.put_failure(experiment, row, explain(error))
        else:
            values = {**model_values(row), "peak_allocated": peak.allocated}
            if peak.reserved is not None:
                values["peak_reserved"] = peak.reserved
            runner.recorder.put(replace(runner.result(experiment, used), values=values))
            runner.recorder.save()
        finally:
            runner.progress.stop()


def _measure(runner: Runner, experiment: Experiment, row: Row) -> tuple[Row, Peak]:
    """Return the row as it was run, balance included, and its peak memory."""
    steps = experiment.scale(runner.scale).steps
    training = runner.build(experiment, row, FakeData([row], runner.seed))

    def before(step: int) -> None:
        runner.start(experiment, row.name, f"{row.name}, step {step + 1} of {steps}")

    return training.row, measure_peak(training, runner.devices, steps=steps, before=before)


def model_values(row: Row) -> dict[str, int | list[int]]:
    """Count the model's parameters, and the bytes of parameters, gradients and optimizer state."""
    parameters = count_parameters(row)
    return {"parameters": parameters, "model_bytes": parameters * FLOAT_BYTES * (2 + row.optimizer.state)}
