"""Run an accuracy experiment: train every row to its end from several seeds, one epoch after another."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import torch

from reproduce.experiments import AccuracyRow, AccuracyScale
from reproduce.records.decode import Json
from reproduce.run.accuracy.needs import AccuracyNeeds
from reproduce.run.accuracy.running_statistics import WholeBatchStatistics
from reproduce.run.accuracy.training import AccuracyTraining
from reproduce.run.failure import Failure, explain
from reproduce.run.session import Session

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")


def plan_accuracy(session: Session) -> None:
    """Tell the progress display what is to come."""
    accuracy, _ = _parts(session)
    for row in cast("list[AccuracyRow]", session.scale.rows):
        epochs, steps = len(accuracy.seeds) * row.recipe.epochs, accuracy.data.train_size // row.batch_size
        # Backward, which an evaluation has not, takes about twice as long as forward.
        forward_only = row.work() / row.batch_size * accuracy.data.val_size / 3
        session.progress.plan(session.job(row), epochs * steps, row.work())
        session.progress.plan(_evaluation(session, row), epochs, forward_only)


def run_accuracy(session: Session) -> None:
    """Train all rows from the first seed, then from the next, so that rows can be compared as soon as possible."""
    accuracy, _ = _parts(session)
    rows = cast("list[AccuracyRow]", session.expected())
    trainings: dict[str, list[_OneTraining]] = {row.name: [] for row in rows}
    for seed in accuracy.seeds:
        for row in rows:
            if not any(training.failure for training in trainings[row.name]):
                _OneTraining(session, row, seed, trainings[row.name]).run()
                session.free()
    for row in rows:
        session.progress.drop(_evaluation(session, row))
    every = [training for of_row in trainings.values() for training in of_row]
    if not any(training.failure and training.failure.status == "failed" for training in every):
        for training in every:  # otherwise, the next run will go on from what there is
            training.retire()


class _OneTraining:
    """Train one row from one seed, and hold what came of it; `of_row` are the row's trainings so far."""

    def __init__(self, session: Session, row: AccuracyRow, seed: int, of_row: list[_OneTraining]) -> None:
        self.session, self.row, self.seed, self.of_row = session, row, seed, of_row
        of_row.append(self)
        self.accuracy, self.scale = _parts(session)
        self.data, self.checkpoints = self.accuracy.data, self.accuracy.checkpoints
        self.epochs, self.steps = row.recipe.epochs, self.data.train_size // row.batch_size
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

        self.series: dict[str, list[float]] = {name: [] for name in SERIES}
        self.resumed_after: list[int] = []
        self.difference: float | None = None
        self.failure: Failure | None = None

    @property
    def done(self) -> int:
        """Count the epochs that are done."""
        return len(self.series["epoch"])

    def run(self) -> None:
        """Train to the end, and put down every epoch; whatever goes wrong is a result."""
        try:
            self.train()
        except Exception as error:
            self.failure = _explain(error)
            for job in self.jobs:
                self.session.progress.drop(job)
        finally:
            self.session.progress.stop()
        self.put()

    def train(self) -> None:
        """Do the epochs that are left."""
        state = self.checkpoints.load(self.path)
        if state is not None:
            self.go_on(state)
        if self.done == self.epochs:
            return
        self.session.start(f"building {self.row.name}")
        training = AccuracyTraining(self.row, self.session.devices, self.seed, self.steps)
        if state is not None:
            training.load(state["training"])
        while self.done < self.epochs:
            self.train_epoch(training)
            self.put()  # first, so that an interrupt while a large checkpoint is written does not lose the epoch
            # The parameters of data that the program makes itself serve nobody after the end.
            keep = self.done < self.epochs or self.scale.made is None
            self.checkpoints.save(self.path, {
                "config": self.config,
                "training": training.state() if keep else None,
                "series": self.series,
                "resumed_after": self.resumed_after,
                "difference": self.difference,
            })  # fmt: skip

    def go_on(self, state: dict[str, Any]) -> None:
        """Take over what a run before has done."""
        self.series, self.resumed_after = state["series"], state["resumed_after"]
        self.difference = state["difference"]
        if not self.accuracy.resumes:
            self.accuracy.resumes = True
            self.session.progress.say(f"going on from the checkpoints in\n{self.path.parent}\n(--fresh starts anew)")
        if self.done < self.epochs:
            self.resumed_after.append(self.done)
            where = f"goes on after epoch {self.done} of {self.epochs}"
            self.session.progress.say(f"{self.row.name}, seed {self.seed}: {where}")
        for job, steps in zip(self.jobs, (self.done * self.steps, self.done), strict=True):
            self.session.progress.skip(job, steps)

    def train_epoch(self, training: AccuracyTraining) -> None:
        """Train on all mini-batches, then evaluate."""
        epoch = self.done + 1
        what = f"{self.row.name}, seed {self.seed}, epoch {epoch} of {self.epochs}"
        checked = self.scale.made is not None and self.row.partitions is not None and epoch == self.epochs
        whole = WholeBatchStatistics(training.layers) if checked else None
        losses = []

        self.session.devices.synchronize()
        started = time.perf_counter()
        for images, labels in self.data.train_batches(self.row.batch_size, self.seed, epoch - 1):
            self.session.start(what, self.jobs[0])
            learning_rate = training.learning_rate
            losses.append(training.step(images, labels))
            if whole is not None:
                whole.end_mini_batch()
        self.session.devices.synchronize()
        seconds = time.perf_counter() - started

        if whole is not None:
            self.difference = whole.close()
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} in epoch {epoch}: the training has diverged")
        self.session.start(f"{what}, evaluating", self.jobs[1])
        error = training.top1_error(self.data.val_batches(self.row.batch_size), self.session.check)
        values = (self.seed, epoch, error, loss, seconds, learning_rate)
        for name, value in zip(SERIES, values, strict=True):
            self.series[name].append(float(value))

    def put(self) -> None:
        """Put down what the row has given so far."""
        values: dict[str, Json] = {"samples_per_epoch": self.steps * self.row.batch_size}
        resumed = [[training.seed, epoch] for training in self.of_row for epoch in training.resumed_after]
        if resumed:
            values["resumed_after"] = resumed
        differences = [training.difference for training in self.of_row if training.difference is not None]
        if differences:
            values["running_statistics_difference"] = differences
        samples = {name: [value for training in self.of_row for value in training.series[name]] for name in SERIES}
        ended: dict[str, Any] = {}
        if self.failure is not None:
            ended = {"status": self.failure.status, "reason": f"seed {self.seed}: {self.failure.reason}"}
        self.session.put(self.row, values=values, samples=samples, **ended)

    def retire(self) -> None:
        """Take the checkpoint out of the next run's way: keep what somebody's own data taught, delete the rest."""
        if self.scale.made is None:
            self.checkpoints.keep(self.path, self.session.recorder.path.stem)
        else:
            self.path.unlink(missing_ok=True)


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
