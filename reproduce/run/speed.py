"""Run a speed experiment: time the steps of all rows in turn, round after round."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from msgspec.structs import replace

from reproduce.experiments import Experiment, Row
from reproduce.machine.devices import Devices
from reproduce.records.decode import Json
from reproduce.run.failure import Failure, explain
from reproduce.run.measure import Sample, in_turn, time_step
from reproduce.run.session import Runner
from reproduce.run.timeline import StepTimeline, watch_step
from reproduce.run.training import FakeData, Training
from reproduce.run.utilization import from_driver, from_timeline

__all__ = ["run_speed"]


def run_speed(runner: Runner, experiment: Experiment) -> None:
    """Time every row; one that did not fit beside the others is timed alone afterwards."""
    rows = runner.runnable(experiment)
    together = _Timing(runner, experiment, FakeData(rows, runner.seed))
    for row in rows:
        together.add(row)
    company = len(together.trainings) > 1
    together.run(limit=experiment.scale(runner.scale).seconds if runner.steps is None else None)
    together.watch()

    crowded = together.crowded if company else []
    limit = experiment.scale(runner.scale).seconds if runner.steps is None else None
    together.trainings.clear()
    del together  # with all that it keeps on the devices, data included
    for row in crowded:
        runner.free()
        alone = _Timing(runner, experiment, FakeData([row], runner.seed), paired=False)
        alone.add(row)
        alone.run(limit=limit)
        alone.watch()
        del alone


def watch(training: Training, devices: Devices) -> tuple[dict[str, Json], StepTimeline | None]:
    """Return utilization and bubble of a row, or why there are none, and the timeline of one of its steps."""

    def step() -> None:
        training.step()
        devices.synchronize()

    timeline = None
    try:
        timeline = watch_step(training, devices)
        busy = from_timeline(timeline) if devices.kind == "cpu" else from_driver(training.devices, step)
    except Exception as error:
        values: dict[str, Json] = {"utilization_problem": explain(error).reason}
    else:
        values = {"utilization": busy}
    if timeline is not None:
        values["bubble"] = timeline.bubble
    return values, timeline


class _Timing:
    """Time some rows in turn, and put down every step after each round.

    Steps that are not `paired` belong to no round: nothing else ran next to them.
    """

    def __init__(self, runner: Runner, experiment: Experiment, data: FakeData, paired: bool = True) -> None:
        self.runner = runner
        self.experiment = experiment
        self.scale = experiment.scale(runner.scale)
        self.data = data
        self.paired = paired
        self.trainings: dict[str, Training] = {}
        self.taken: dict[str, list[Sample]] = {}
        self.crowded: list[Row] = []

    def add(self, row: Row) -> None:
        """Build a row and run its first steps, which are slower than the rest."""
        try:
            training = self.runner.build(self.experiment, row, self.data)
            for _ in range(max(self.scale.warmup, row.skipped_steps)):
                self.start(row.name, "warming up")
                time_step(training, self.runner.devices)
        except Exception as error:
            self.fail(row, explain(error))
        else:
            self.trainings[row.name] = training
            self.taken[row.name] = []
        finally:
            self.runner.progress.stop()

    def run(self, limit: float | None) -> None:
        """Time all rows, until `limit` seconds are over where there is one."""
        rounds = self.runner.steps or self.scale.steps
        started = time.monotonic()
        if limit is not None:
            self.runner.progress.limit(f"{self.experiment.name} ", limit)

        def enough(done: int) -> bool:
            self.put_all()
            return limit is not None and done >= self.scale.least_steps and time.monotonic() - started > limit

        steps = in_turn(
            self.trainings,
            self.runner.devices,
            rounds=rounds,
            seed=self.runner.seed,
            enough=enough,
            before=lambda done, row: self.start(row, f"round {done + 1} of {rounds},"),
        )
        try:
            for sample in steps:
                if sample.failure is None:
                    self.taken[sample.row].append(sample)
                else:
                    del self.taken[sample.row]
                    self.fail(self.trainings.pop(sample.row).row, sample.failure)
        finally:
            self.put_all()
            self.runner.progress.stop()

    def watch(self) -> None:
        """Run every row for one more step or a few, which are not timed, to see how busy each device is."""
        for name, training in self.trainings.items():
            if self.taken[name]:
                self.start(name, "watching")
                values, timeline = watch(training, self.runner.devices)
                self.runner.add_values(self.experiment, name, **values)
                if timeline is not None and self.runner.trace is not None:
                    self.runner.trace(self.experiment.name, name, timeline)
        self.runner.progress.stop()

    def start(self, row: str, what: str) -> None:
        """Show that a step starts."""
        self.runner.start(self.experiment, row, f"{what} {row}")

    def fail(self, row: Row, failure: Failure) -> None:
        """Put down a row's failure, and remember it where more room might help."""
        self.runner.put_failure(self.experiment, row, failure)
        if failure.status == "out of memory":
            self.crowded.append(row)

    def put_all(self) -> None:
        """Put down the steps so far."""
        for name, samples in self.taken.items():
            if samples:
                result = self.runner.result(self.experiment, self.trainings[name].row)
                self.runner.recorder.put(replace(result, samples=self.series(samples)))
        self.runner.recorder.save()

    def series(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """Return the steps as a record's series. A loss that is no number is none that JSON could hold."""
        series = {"step_time": [sample.seconds for sample in samples]}
        if all(math.isfinite(sample.loss) for sample in samples):
            series["loss"] = [sample.loss for sample in samples]
        if self.paired:
            series["round"] = [sample.round for sample in samples]
        return series
