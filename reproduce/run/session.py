"""Run experiments: every row of every table through the same few steps, each ending in a result, never in a crash."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from reproduce.experiments import Experiment, Row
from reproduce.machine.devices import Devices
from reproduce.records.decode import Json
from reproduce.records.record import Result
from reproduce.run.failure import Failure
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder
from reproduce.run.timeline import StepTimeline
from reproduce.run.training import Balancer, FakeData, Training, size_names

if TYPE_CHECKING:
    from reproduce.run.accuracy.run import Accuracy

__all__ = ["UNITS", "Runner"]

UNITS = {
    "step_time": "s",
    "loss": "1",
    "round": "number of the round, from 0; steps of one round ran next to each other",
    "parameters": "count",
    "model_bytes": "bytes",
    "peak_allocated": "bytes, of each device",
    "peak_reserved": "bytes, of each device",
    "memory_problem": "why there is no memory",
    "utilization": "share of the time that each device was busy, from 0 to 1",
    "utilization_problem": "why there is no utilization",
    "bubble": "share of the devices' time, from the first task to the last, in which they waited, from 0 to 1",
    "seed": "seed that the training of the epoch started from",
    "epoch": "number of the epoch, from 1; series of one row belong together, value by value",
    "top1_error": "%, after the epoch",
    "train_loss": "1, mean over the epoch",
    "epoch_time": "s, of training alone, reading data included",
    "learning_rate": "1, of the epoch's last step",
    "samples_per_epoch": "count",
    "resumed_after": "[seed, epoch] after which the training was continued by another run",
    "running_statistics_difference": "1, largest of any batch norm in the last epoch, for each finished seed; relative",
}


class Runner:
    """Hold what running any experiment needs: where, at which scale, and who is told."""

    def __init__(
        self,
        devices: Devices,
        recorder: Recorder,
        progress: Progress,
        *,
        scale: str,
        seed: int,
        steps: int | None = None,
        check: Callable[[], None] = lambda: None,
        trace: Callable[[str, str, StepTimeline], None] | None = None,
        accuracy: Accuracy | None = None,
    ) -> None:
        """Prepare to run.

        `steps` replaces the number of timed steps, and the time limit, of speed experiments. `check` is called
        between steps, and raises where the run is to end. `trace` is given experiment, row and timeline of one
        more step of every speed row. `accuracy` is what experiments on accuracy need.
        """
        self.devices = devices
        self.recorder = recorder
        self.progress = progress
        self.scale = scale
        self.seed = seed
        self.steps = steps
        self.check = check
        self.trace = trace
        self.accuracy = accuracy
        self.balancer = Balancer(devices)

    def plan(self, experiment: Experiment) -> None:
        """Tell the progress display what is to come."""
        if experiment.measures == "accuracy":
            from reproduce.run.accuracy.run import plan_accuracy

            plan_accuracy(self, experiment)
            return
        scale = experiment.scale(self.scale)
        for row in scale.rows:
            steps = scale.steps
            if experiment.measures != "memory":
                steps = max(scale.warmup, row.skipped_steps) + (self.steps or scale.steps)
            if row.devices <= self.devices.count:
                self.progress.plan(self.job(experiment, row.name), steps, row.work())

    def run(self, experiment: Experiment) -> None:
        """Run one experiment."""
        from reproduce.run.ablation import run_ablation
        from reproduce.run.accuracy.run import run_accuracy
        from reproduce.run.memory import run_memory
        from reproduce.run.speed import run_speed

        ways = {"speed": run_speed, "memory": run_memory, "ablation": run_ablation, "accuracy": run_accuracy}
        with self.devices.in_use():
            ways[experiment.measures](self, experiment)
        for row in experiment.scale(self.scale).rows:
            self.progress.drop(self.job(experiment, row.name))

    # What the ways to run an experiment share:

    def runnable(self, experiment: Experiment) -> list[Row]:
        """Return the rows for which there are devices, and put down what the others need."""
        rows = []
        for row in experiment.scale(self.scale).rows:
            result = replace(self.result(experiment, row), status="not run")
            if row.devices <= self.devices.count:
                rows.append(row)
            else:
                result = replace(result, status="needs devices", reason=f"needs {row.devices} devices")
            self.recorder.put(result)
        self.recorder.save()
        return rows

    def start(self, experiment: Experiment, row: str, what: str) -> None:
        """Show that something starts: a step, where a row is named."""
        self.check()
        self.progress.start(self.job(experiment, row) if row else "", f"{experiment.name}: {what}")

    def build(self, experiment: Experiment, row: Row, data: FakeData) -> Training:
        """Make the row ready to train."""
        self.start(experiment, "", f"building {row.name}")
        return Training(row, self.devices, data, self.balancer, self.seed)

    def result(
        self, experiment: Experiment, row: Row, *, scale: str | None = None, device: str | None = None
    ) -> Result:
        """Return a result for `row`, to be filled."""
        return Result(
            experiment=experiment.name,
            row=row.name,
            status="measured",
            scale=scale or self.scale,
            device=device or self.devices.kind,
            config=row.config(size_names(row.model)),
            over=row.over,
            over_published=row.over_published,
            published=None if row.published is None else f"{experiment.table}/{row.published}",
        )

    def was_measured(self, experiment: Experiment, row: str) -> bool:
        """Tell whether the row has been measured in this run."""
        result = self.recorder.results.get((experiment.name, self.scale, self.devices.kind, row))
        return result is not None and result.status == "measured"

    def add_values(self, experiment: Experiment, row: str, **values: Json) -> None:
        """Add values to a row's result, and write the record."""
        self.recorder.add_values(experiment.name, self.scale, self.devices.kind, row, **values)
        self.recorder.save()

    def put_failure(self, experiment: Experiment, row: Row, failure: Failure) -> None:
        """Put down how a row ended that did not succeed."""
        result = self.result(experiment, row)
        self.recorder.put(replace(result, status=failure.status, reason=failure.reason))
        self.recorder.save()
        self.progress.drop(self.job(experiment, row.name))

    def free(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.devices.kind == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def job(experiment: Experiment, row: str) -> str:
        """Name the row to the progress display."""
        return f"{experiment.name} {row}"
