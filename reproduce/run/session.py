"""Hold one experiment that is being run, and what all ways of running share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from reproduce.experiments import Experiment, Row, Scale
from reproduce.machine.devices import Devices
from reproduce.records.decode import Json
from reproduce.records.record import Result
from reproduce.run.accuracy.needs import AccuracyNeeds
from reproduce.run.failure import Failure
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe.plan.replay import Timeline

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


@dataclass(kw_only=True)
class Session:
    """Run `experiment` at `scale`: every row ends in a result of `recorder`, and `progress` shows each step.

    `steps` replaces the number of timed steps, and the time limit, of speed experiments. `check` is called between
    steps, and raises where the run is to end. `trace` is given experiment, row and timeline of one more step of every
    speed row. Experiments on accuracy need `accuracy`.
    """

    experiment: Experiment
    scale: Scale
    devices: Devices
    recorder: Recorder
    progress: Progress
    balancer: Balancer
    seed: int
    steps: int | None = None
    check: Callable[[], None] = lambda: None
    trace: Callable[[str, str, Timeline], None] | None = None
    accuracy: AccuracyNeeds | None = None

    def fitting(self) -> list[Row]:
        """Return the rows for which there are devices."""
        return [row for row in self.scale.rows if row.devices <= self.devices.count]

    def runnable(self) -> list[Row]:
        """Return the rows for which there are devices, and record what the others need."""
        fitting = self.fitting()
        for row in self.scale.rows:
            if row in fitting:
                self.put(row, status="not run")
            else:
                self.put(row, status="needs devices", reason=f"needs {row.devices} devices")
        return fitting

    def job(self, row: Row) -> str:
        """Name the row's steps to the progress display."""
        return f"{self.experiment.name} {row.name}"

    def start(self, text: str, job: str = "") -> None:
        """Show that something starts: a step, where a job is named."""
        self.check()
        self.progress.start(job, f"{self.experiment.name}: {text}")

    def build(self, row: Row, data: FakeData) -> Training:
        """Make the row ready to train."""
        self.start(f"building {row.name}")
        return Training(row, self.devices, data, self.balancer, self.seed)

    def result(self, row: Row) -> Result:
        """Return an empty result for `row`."""
        return Result(
            experiment=self.experiment.name,
            row=row.name,
            status="measured",
            scale=self.scale.name,
            device=self.devices.kind,
            config=row.config(),
            over=row.over,
            over_published=row.over_published,
            published=None if row.published is None else f"{self.experiment.table}/{row.published}",
        )

    def put(self, row: Row, **changes: Any) -> None:
        """Record the row's result with these fields, and write the record."""
        self.recorder.put(replace(self.result(row), **changes))
        self.recorder.save()

    def put_failure(self, row: Row, failure: Failure) -> None:
        """Record how a row ended that did not succeed."""
        self.put(row, status=failure.status, reason=failure.reason)
        self.progress.drop(self.job(row))

    def recorded(self, row: Row) -> Result:
        """Return what is recorded of the row."""
        return self.recorder.results[self.experiment.name, self.scale.name, self.devices.kind, row.name]

    def add_values(self, row: Row, values: dict[str, Json]) -> None:
        """Add values to a row's result, and write the record."""
        result = self.recorded(row)
        self.recorder.put(replace(result, values={**result.values, **values}))
        self.recorder.save()

    def free(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.devices.kind == "cuda":
            torch.cuda.empty_cache()
