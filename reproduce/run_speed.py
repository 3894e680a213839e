"""Run a speed experiment: time the steps of all rows in turn, round after round."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from reproduce.experiments import Experiment, Row
from reproduce.failure import Failure, explain
from reproduce.measure import Sample, in_turn, time_step
from reproduce.runner import Runner
from reproduce.training import FakeData, Training

__all__ = ["run_speed"]


def run_speed(runner: Runner, experiment: Experiment) -> None:
    """Time every row; one that did not fit beside the others is timed alone afterwards."""
    data = FakeData(experiment.scale(runner.scale).rows, runner.seed)
    together = _Timing(runner, experiment, data)
    for row in runner.runnable(experiment):
        together.add(row)
    company = len(together.trainings) > 1
    together.run(limit=experiment.scale(runner.scale).seconds if runner.steps is None else None)

    together.trainings.clear()
    for row in together.crowded if company else []:
        runner.free()
        alone = _Timing(runner, experiment, data, paired=False)
        alone.add(row)
        alone.run(limit=None)


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
            for _ in range(self.scale.warmup):
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
