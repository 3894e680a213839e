"""Run an accuracy experiment: train every row to its end from several seeds, one epoch after another."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from reproduce.experiments import AccuracyRow, AccuracyScale
from reproduce.records.decode import Json
from reproduce.run.accuracy.needs import AccuracyNeeds
from reproduce.run.accuracy.running_statistics import WholeBatchStatistics
from reproduce.run.accuracy.training import AccuracyTraining
from reproduce.run.failure import Failure, explain
from reproduce.run.session import Session

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")


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


def plan_accuracy(session: Session) -> None:
    """Tell the progress display what is to come."""
    accuracy, scale = _parts(session)
    for row in scale.rows:
        if row.devices <= session.devices.count:
            epochs, steps = len(accuracy.seeds) * row.recipe.epochs, accuracy.data.train_size // row.batch_size
            # Backward, which an evaluation has not, takes about twice as long as forward.
            forward_only = row.work() / row.batch_size * accuracy.data.val_size / 3
            session.progress.plan(session.job(row), epochs * steps, row.work())
            session.progress.plan(_evaluation(session, row), epochs, forward_only)


def run_accuracy(session: Session) -> None:
    """Train all rows from the first seed, then from the next, so that rows can be compared as soon as possible."""
    accuracy, _ = _parts(session)
    rows = [cast("AccuracyRow", row) for row in session.runnable()]
    curves: dict[str, list[Curve]] = {row.name: [] for row in rows}
    trainings: list[_OneTraining] = []
    for seed in accuracy.seeds:
        for row in rows:
            if not any(curve.failure for curve in curves[row.name]):
                trainings.append(_OneTraining(session, row, seed, curves[row.name]))
                trainings[-1].run()
                session.free()
    for row in rows:
        session.progress.drop(_evaluation(session, row))
    if any(curve.failure and curve.failure.status == "failed" for each in curves.values() for curve in each):
        return  # the next run will go on from what there is
    for training in trainings:
        training.retire()


class _OneTraining:
    """Train one row from one seed; `curves` are those of the row's seeds so far."""

    def __init__(self, session: Session, row: AccuracyRow, seed: int, curves: list[Curve]) -> None:
        self.session, self.row, self.seed, self.curves = session, row, seed, curves
        self.accuracy, self.scale = _parts(session)
        self.data, self.checkpoints = self.accuracy.data, self.accuracy.checkpoints
        self.steps = self.data.train_size // row.batch_size
        self.config = row.config()
        depends_on: Json = {
            "config": self.config,
            "seed": seed,
            "data": [session.seed if self.scale.made else None, self.scale.settings()["made"], self.data.classes,
                     self.data.train_size, self.data.val_size],
            "device": [session.devices.kind, session.devices.threads],
        }  # fmt: skip
        name = f"{session.experiment.name}-{self.scale.name}-{row.name}-seed{seed}"
        self.path = self.checkpoints.path(name, depends_on)
        self.jobs = (session.job(row), _evaluation(session, row))  # the training's and the evaluation's
        self.curve = Curve(seed)

    def run(self) -> None:
        """Train to the end, and put down every epoch; whatever goes wrong is a result."""
        self.curves.append(self.curve)
        try:
            self.train()
        except Exception as error:
            self.curve.failure = _explain(error)
            for job in self.jobs:
                self.session.progress.drop(job)
        finally:
            self.session.progress.stop()
        self.put()

    def train(self) -> None:
        """Do the epochs that are left."""
        epochs = self.row.recipe.epochs
        state = self.checkpoints.load(self.path)
        if state is not None:
            self.go_on(state)
        if self.curve.epochs == epochs:
            return
        self.session.start(f"building {self.row.name}")
        training = AccuracyTraining(self.row, self.session.devices, self.seed, self.steps)
        if state is not None:
            training.load(state["training"])
        for epoch in range(self.curve.epochs, epochs):
            self.train_epoch(training, epoch)
            self.put()  # first, so that an interrupt while a large checkpoint is written does not lose the epoch
            done = epoch + 1 == epochs
            # The parameters of data that the program makes itself serve nobody after the end.
            keep = not done or self.scale.made is None
            self.checkpoints.save(
                self.path,
                {"config": self.config, "training": training.state() if keep else None, **self.curve.state()},
            )

    def go_on(self, state: dict[str, Any]) -> None:
        """Take over what a run before has done."""
        self.curve.load(state)
        epochs, done = self.row.recipe.epochs, self.curve.epochs
        if not self.accuracy.resumes:
            self.accuracy.resumes = True
            self.session.progress.say(f"going on from the checkpoints in\n{self.path.parent}\n(--fresh starts anew)")
        if done < epochs:
            self.curve.resumed_after.append(done)
            self.session.progress.say(f"{self.row.name}, seed {self.seed}: goes on after epoch {done} of {epochs}")
        for job, steps in zip(self.jobs, (done * self.steps, done), strict=True):
            self.session.progress.skip(job, steps)

    def train_epoch(self, training: AccuracyTraining, epoch: int) -> None:
        """Train on all mini-batches, then evaluate."""
        what = f"{self.row.name}, seed {self.seed}, epoch {epoch + 1} of {self.row.recipe.epochs}"
        checked = self.scale.made is not None and self.row.partitions is not None
        last = epoch + 1 == self.row.recipe.epochs
        whole = WholeBatchStatistics(training.layers) if checked and last else None
        losses: list[Tensor] = []
        learning_rate = training.learning_rate

        self.session.devices.synchronize()
        started = time.perf_counter()
        for images, labels in self.data.train_batches(self.row.batch_size, self.seed, epoch):
            self.session.start(what, self.jobs[0])
            learning_rate = training.learning_rate
            losses.append(training.step(images, labels))
            if whole is not None:
                whole.end_mini_batch()
        self.session.devices.synchronize()
        seconds = time.perf_counter() - started

        if whole is not None:
            self.curve.difference = whole.difference()
            whole.close()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch + 1}: the training has diverged")
        self.session.start(f"{what}, evaluating", self.jobs[1])
        error = training.top1_error(self.data.val_batches(self.row.batch_size), self.session.check)
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
        samples = {name: [value for curve in curves for value in curve.series[name]] for name in SERIES}
        ended: dict[str, str] = {}
        if self.curve.failure is not None:
            reason = f"seed {self.seed}: {self.curve.failure.reason}"
            ended = {"status": self.curve.failure.status, "reason": reason}
        self.session.put(self.row, values=values, samples=samples, **ended)

    def retire(self) -> None:
        """Take the checkpoint out of the next run's way: keep what somebody's own data taught, delete the rest."""
        if self.scale.made is None:
            self.checkpoints.keep(self.path, self.session.recorder.path.stem)
        else:
            self.checkpoints.remove(self.path)


def _parts(session: Session) -> tuple[AccuracyNeeds, AccuracyScale]:
    assert session.accuracy is not None and isinstance(session.scale, AccuracyScale)
    return session.accuracy, session.scale


def _evaluation(session: Session, row: AccuracyRow) -> str:
    return f"{session.job(row)} evaluation"


def _explain(error: Exception) -> Failure:
    """Return what to write into a record. What a worker process raised is told in the last line of a traceback."""
    said = str(error).strip().splitlines()
    if said and "in DataLoader worker process" in said[0]:
        return Failure("failed", said[-1].removeprefix("reproduce.error.Error: "))
    return explain(error)
