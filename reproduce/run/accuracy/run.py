"""Run an accuracy experiment: train every row to its end from several seeds, one epoch after another."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from reproduce.error import USAGE, Error
from reproduce.experiments import AccuracyRow, AccuracyScale, Experiment
from reproduce.records.decode import Json
from reproduce.run.accuracy.checkpoints import Checkpoints
from reproduce.run.accuracy.datasets import Dataset, Gratings
from reproduce.run.accuracy.imagenet import LAYOUT, ImageNet
from reproduce.run.accuracy.running_statistics import Undivided
from reproduce.run.accuracy.training import AccuracyTraining
from reproduce.run.failure import Failure, explain
from reproduce.run.session import Runner

__all__ = ["Accuracy", "plan_accuracy", "run_accuracy"]

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")


class Accuracy:
    """Hold what only experiments on accuracy need: data, seeds, and a place for checkpoints."""

    def __init__(
        self, folder: Path, *, data: Path | None = None, seeds: int | None = None, fresh: bool = False
    ) -> None:
        """Take the folder of checkpoints; `seeds` replaces a scale's number of seeds.

        Raises:
            Error: it cannot be had.
        """
        self.data = data
        self.seeds = seeds
        self.checkpoints = Checkpoints(folder, fresh=fresh)
        self.datasets: dict[str, Dataset] = {}
        self.told = False  # that there are checkpoints to go on from

    def prepare(self, experiment: Experiment, scale: str, seed: int) -> None:
        """Find or make the experiment's data.

        Raises:
            Error: there are none, or they are not as they should be.
        """
        chosen = _scale(experiment, scale)
        if chosen.made is not None:
            if self.data is not None:
                raise Error(f"--data {self.data}: scale {scale} makes its own data; leave --data out", USAGE)
            self.datasets[experiment.name] = Gratings(**vars(chosen.made), seed=seed)
        elif self.data is None:
            raise Error(
                f"{experiment.name} at scale {scale} trains on ImageNet: name its folder by --data DIR, "
                f"which must have {LAYOUT}; or use --scale small",
                USAGE,
            )
        else:
            row = chosen.rows[0]
            workers = dict(row.data)["dataloader_workers"]
            self.datasets[experiment.name] = ImageNet(self.data, classes=row.num_classes, workers=workers)

    def seeds_of(self, scale: AccuracyScale, first: int) -> range:
        """Return the seeds that every row is trained from."""
        return range(first, first + (self.seeds or scale.seeds))


@dataclass
class Curve:
    """Hold what one training has given so far, and how it ended where it did not succeed."""

    seed: int
    series: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERIES})
    resumed_after: list[int] = field(default_factory=list)
    difference: float | None = None
    failure: Failure | None = None

    @property
    def epochs(self) -> int:
        """Count the epochs that are done."""
        return len(self.series["epoch"])

    def add(self, **values: float) -> None:
        """Add an epoch."""
        for name in SERIES:
            self.series[name].append(float({"seed": self.seed, **values}[name]))

    def state(self) -> dict[str, Any]:
        """Return all of it, as a checkpoint keeps it."""
        return {"series": self.series, "resumed_after": self.resumed_after, "difference": self.difference}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.series, self.resumed_after = state["series"], state["resumed_after"]
        self.difference = state["difference"]


def plan_accuracy(runner: Runner, experiment: Experiment) -> None:
    """Tell the progress display what is to come."""
    accuracy, scale, data = _parts(runner, experiment)
    trainings = len(accuracy.seeds_of(scale, runner.seed))
    for row in scale.rows:
        if row.devices <= runner.devices.count:
            epochs, steps = trainings * row.recipe.epochs, data.train_size // row.batch_size
            forward_only = row.work() / row.batch_size * data.val_size / 3  # backward takes about twice as long
            runner.progress.plan(runner.job(experiment, row.name), epochs * steps, row.work())
            runner.progress.plan(_evaluation(runner, experiment, row), epochs, forward_only)


def run_accuracy(runner: Runner, experiment: Experiment) -> None:
    """Train all rows from the first seed, then from the next, so that rows can be compared as soon as possible."""
    accuracy, scale, _ = _parts(runner, experiment)
    rows = [cast("AccuracyRow", row) for row in runner.runnable(experiment)]
    curves: dict[str, list[Curve]] = {row.name: [] for row in rows}
    trainings: list[_OneTraining] = []
    for seed in accuracy.seeds_of(scale, runner.seed):
        for row in rows:
            if not any(curve.failure for curve in curves[row.name]):
                trainings.append(_OneTraining(runner, experiment, row, seed, curves[row.name]))
                trainings[-1].run()
                runner.free()
    for row in rows:
        runner.progress.drop(_evaluation(runner, experiment, row))
    if any(curve.failure and curve.failure.status == "failed" for each in curves.values() for curve in each):
        return  # the next run will go on from what there is
    for training in trainings:
        training.retire()


class _OneTraining:
    """Train one row from one seed; `curves` are those of the row's seeds so far."""

    def __init__(
        self, runner: Runner, experiment: Experiment, row: AccuracyRow, seed: int, curves: list[Curve]
    ) -> None:
        self.runner, self.experiment, self.row, self.seed, self.curves = runner, experiment, row, seed, curves
        self.accuracy, self.scale, self.data = _parts(runner, experiment)
        self.steps = self.data.train_size // row.batch_size
        self.config = runner.result(experiment, row).config
        depends_on: Json = {
            "config": self.config,
            "seed": seed,
            "data": [runner.seed if self.scale.made else None, self.scale.settings()["made"], self.data.classes,
                     self.data.train_size, self.data.val_size],
            "device": [runner.devices.kind, runner.devices.threads],
        }  # fmt: skip
        self.name = f"{experiment.name}-{runner.scale}-{row.name}-seed{seed}"
        self.path = self.accuracy.checkpoints.path(self.name, depends_on)
        self.curve = Curve(seed)

    def run(self) -> None:
        """Train to the end, and put down every epoch; whatever goes wrong is a result."""
        self.curves.append(self.curve)
        try:
            self.train()
        except Exception as error:
            self.curve.failure = _explain(error)
            for job in self.jobs:
                self.runner.progress.drop(job)
        finally:
            self.runner.progress.stop()
        self.put()

    @property
    def jobs(self) -> tuple[str, str]:
        """Name the training and the evaluation to the progress display."""
        return self.runner.job(self.experiment, self.row.name), _evaluation(self.runner, self.experiment, self.row)

    def train(self) -> None:
        """Do the epochs that are left."""
        epochs = self.row.recipe.epochs
        state = self.accuracy.checkpoints.load(self.path)
        if state is not None:
            self.go_on(state)
        if self.curve.epochs == epochs:
            return
        self.runner.start(self.experiment, "", f"building {self.row.name}")
        training = AccuracyTraining(self.row, self.runner.devices, self.seed, self.steps)
        if state is not None:
            training.load(state["training"])
        for epoch in range(self.curve.epochs, epochs):
            self.train_epoch(training, epoch)
            self.put()  # first, so that an interrupt while a large checkpoint is written does not lose the epoch
            done = epoch + 1 == epochs
            # The parameters of data that the program makes itself serve nobody after the end.
            keep = not done or self.scale.made is None
            self.accuracy.checkpoints.save(
                self.path,
                {"config": self.config, "training": training.state() if keep else None, **self.curve.state()},
            )

    def go_on(self, state: dict[str, Any]) -> None:
        """Take over what a run before has done."""
        self.curve.load(state)
        epochs, done = self.row.recipe.epochs, self.curve.epochs
        if not self.accuracy.told:
            self.accuracy.told = True
            self.runner.progress.say(f"going on from the checkpoints in\n{self.path.parent}\n(--fresh starts anew)")
        if done < epochs:
            self.curve.resumed_after.append(done)
            self.runner.progress.say(f"{self.row.name}, seed {self.seed}: goes on after epoch {done} of {epochs}")
        for job, steps in zip(self.jobs, (done * self.steps, done), strict=True):
            self.runner.progress.skip(job, steps)

    def train_epoch(self, training: AccuracyTraining, epoch: int) -> None:
        """Train on all mini-batches, then evaluate."""
        what = f"{self.row.name}, seed {self.seed}, epoch {epoch + 1} of {self.row.recipe.epochs}"
        checked = self.scale.made is not None and self.row.partitions is not None
        last = epoch + 1 == self.row.recipe.epochs
        undivided = Undivided(training.layers) if checked and last else None
        losses: list[Tensor] = []
        learning_rate = training.learning_rate

        self.runner.devices.synchronize()
        started = time.perf_counter()
        for images, labels in self.data.train_batches(self.row.batch_size, self.seed, epoch):
            self.runner.start(self.experiment, self.row.name, what)
            learning_rate = training.learning_rate
            losses.append(training.step(images, labels))
            if undivided is not None:
                undivided.end_mini_batch()
        self.runner.devices.synchronize()
        seconds = time.perf_counter() - started

        if undivided is not None:
            self.curve.difference = undivided.difference()
            undivided.close()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch + 1}: the training has diverged")
        self.runner.check()
        self.runner.progress.start(self.jobs[1], f"{self.experiment.name}: {what}, evaluating")
        error = training.top1_error(self.data.val_batches(self.row.batch_size), self.runner.check)
        self.curve.add(epoch=epoch + 1, top1_error=error, train_loss=loss, epoch_time=seconds,
                       learning_rate=learning_rate)  # fmt: skip

    def put(self) -> None:
        """Put down what the row has given so far."""
        curves = self.curves
        values: dict[str, Json] = {"samples_per_epoch": self.steps * self.row.batch_size}
        resumed = [[curve.seed, epoch] for curve in curves for epoch in curve.resumed_after]
        if resumed:
            values["resumed_after"] = resumed
        differences = [curve.difference for curve in curves if curve.difference is not None]
        if differences:
            values["running_statistics_difference"] = differences
        result = replace(
            self.runner.result(self.experiment, self.row),
            values=values,
            samples={name: [value for curve in curves for value in curve.series[name]] for name in SERIES},
        )
        if self.curve.failure is not None:
            reason = f"seed {self.seed}: {self.curve.failure.reason}"
            result = replace(result, status=self.curve.failure.status, reason=reason)
        self.runner.recorder.put(result)
        self.runner.recorder.save()

    def retire(self) -> None:
        """Take the checkpoint out of the next run's way: keep what somebody's own data taught, delete the rest."""
        if self.scale.made is None:
            self.accuracy.checkpoints.keep(self.path, self.runner.recorder.path.stem)
        else:
            self.accuracy.checkpoints.remove(self.path)


def _scale(experiment: Experiment, name: str) -> AccuracyScale:
    scale = experiment.scale(name)
    assert isinstance(scale, AccuracyScale)
    return scale


def _parts(runner: Runner, experiment: Experiment) -> tuple[Accuracy, AccuracyScale, Dataset]:
    assert runner.accuracy is not None
    return runner.accuracy, _scale(experiment, runner.scale), runner.accuracy.datasets[experiment.name]


def _evaluation(runner: Runner, experiment: Experiment, row: AccuracyRow) -> str:
    return runner.job(experiment, f"{row.name} evaluation")


def _explain(error: Exception) -> Failure:
    """Return what to write into a record. What a worker process raised is told in the last line of a traceback."""
    said = str(error).strip().splitlines()
    if said and "in DataLoader worker process" in said[0]:
        return Failure("failed", said[-1].removeprefix("reproduce.error.Error: "))
    return explain(error)
