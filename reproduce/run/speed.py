"""Run a speed experiment: time the steps of all rows in turn, so that a machine's drift hits all rows alike.

A round is one step of every row, in an order drawn anew for each round. A step is timed from a moment when every
device is idle to the next such moment, and every time is kept: rows are compared within rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from reproduce.experiments import Row
from reproduce.machine.devices import Devices
from reproduce.records.decode import Json
from reproduce.run.failure import Failure, explain
from reproduce.run.session import Session
from reproduce.run.timeline import watch_step
from reproduce.run.training import FakeData, Training
from reproduce.run.utilization import ask_driver
from torchgpipe.plan.replay import Timeline


def plan_speed(session: Session) -> None:
    """Tell the progress display how many steps are to come."""
    for row in session.fitting():
        steps = max(session.scale.warmup, row.skipped_steps) + (session.steps or session.scale.steps)
        session.progress.plan(session.job(row), steps, row.work())


def run_speed(session: Session) -> None:
    """Time every row; one that did not fit beside the others is timed alone afterwards."""
    rows = session.runnable()
    without_memory = _time_rows(session, rows)
    for row in without_memory if len(rows) > 1 else []:
        session.free()
        _time_rows(session, [row], paired=False)


def _time_rows(session: Session, rows: Sequence[Row], *, paired: bool = True) -> list[Row]:
    """Time rows in turn, then watch each; return those that ran out of memory. Nothing stays on the devices."""
    timing = _Timing(session, rows, paired)
    for row in rows:
        timing.add(row)
    timing.run()
    timing.watch()
    return timing.without_memory


class _Timing:
    """Time rows in turn, and record every step after each round.

    Steps that are not `paired` belong to no round: nothing else ran next to them.
    """

    def __init__(self, session: Session, rows: Sequence[Row], paired: bool) -> None:
        self.session, self.scale = session, session.scale
        self.data = FakeData(rows, session.seed)
        self.series = ("step_time", "loss", "round") if paired else ("step_time", "loss")
        self.trainings: dict[str, Training] = {}
        self.taken: dict[str, list[tuple[float, float, int]]] = {}  # of each row: seconds, loss, round
        self.without_memory: list[Row] = []

    def add(self, row: Row) -> None:
        """Build a row and run its first steps, which are slower than the rest."""
        try:
            training = self.session.build(row, self.data)
            for _ in range(max(self.scale.warmup, row.skipped_steps)):
                self.start("warming up", row)
                time_step(training, self.session.devices)
        except Exception as error:
            self.fail(row, explain(error))
        else:
            self.trainings[row.name], self.taken[row.name] = training, []
        finally:
            self.session.progress.stop()

    def run(self) -> None:
        """Time all rows, round after round, until the scale's time is over where it has a limit."""
        rounds, limit = self.session.steps or self.scale.steps, math.inf
        if self.session.steps is None and self.scale.seconds is not None:
            limit = self.scale.seconds
            self.session.progress.limit(f"{self.session.experiment.name} ", limit)
        started, order = time.monotonic(), random.Random(self.session.seed)
        try:
            for done in range(rounds):
                for name in order.sample(list(self.trainings), len(self.trainings)):
                    self.step(name, done, rounds)
                self.put_all()
                if done + 1 >= self.scale.least_steps and time.monotonic() - started > limit:
                    break
        finally:
            self.put_all()
            self.session.progress.stop()

    def step(self, name: str, done: int, rounds: int) -> None:
        """Time one step of a row; a row that fails is left out from then on."""
        training = self.trainings[name]
        self.start(f"round {done + 1} of {rounds},", training.row)
        try:
            seconds, loss = time_step(training, self.session.devices)
        except Exception as error:
            del self.trainings[name], self.taken[name]
            self.fail(training.row, explain(error))
        else:
            self.taken[name].append((seconds, loss, done))

    def watch(self) -> None:
        """Run every row for one more step or a few, which are not timed, to see how busy each device is."""
        for training in self.trainings.values():
            self.start("watching", training.row)
            values, timeline = watch(training, self.session.devices)
            self.session.add_values(training.row, values)
            if timeline is not None and self.session.trace is not None:
                self.session.trace(self.session.experiment.name, training.row.name, timeline)
        self.session.progress.stop()

    def start(self, what: str, row: Row) -> None:
        """Show that a step starts."""
        self.session.start(f"{what} {row.name}", self.session.job(row))

    def fail(self, row: Row, failure: Failure) -> None:
        """Record a row's failure, and remember it where more room might help."""
        self.session.put_failure(row, failure)
        if failure.status == "out of memory":
            self.without_memory.append(row)

    def put_all(self) -> None:
        """Record the steps so far. A loss that is no number is none that JSON could hold."""
        for name, steps in self.taken.items():
            if steps:
                samples = dict(zip(self.series, map(list, zip(*steps, strict=True)), strict=False))
                if not all(map(math.isfinite, samples["loss"])):
                    del samples["loss"]
                self.session.put(self.trainings[name].row, samples=samples)


def time_step(training: Training, devices: Devices) -> tuple[float, float]:
    """Run one whole step and return its time in seconds and its loss."""
    devices.synchronize()
    started = time.perf_counter()
    loss = training.step()
    devices.synchronize()
    seconds = time.perf_counter() - started
    return seconds, float(loss)


def watch(training: Training, devices: Devices) -> tuple[dict[str, Json], Timeline | None]:
    """Return utilization and bubble of a row, or why there are none, and the timeline of one of its steps."""

    def step() -> None:
        training.step()
        devices.synchronize()

    values: dict[str, Json] = {}
    timeline = None
    try:
        timeline = watch_step(training, devices)
        if devices.kind == "cuda":
            values["utilization"] = ask_driver(training.devices, step)
        else:
            values["utilization"] = [min(1.0, timeline.busy(j) / timeline.seconds) for j in range(timeline.partitions)]
    except Exception as error:
        values["utilization_problem"] = explain(error).reason
    if timeline is not None:
        values["bubble"] = timeline.bubble
    return values, timeline
