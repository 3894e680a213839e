"""Run experiments: every row of every table through the same few steps, each ending in a result, never in a crash."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from reproduce.devices import Devices
from reproduce.experiments import Experiment, Row, Scale
from reproduce.failure import Failure, explain
from reproduce.measure import Sample, in_turn, time_step
from reproduce.memory import measure_peak
from reproduce.progress import Progress
from reproduce.record import Result
from reproduce.recorder import Recorder
from reproduce.training import Balancer, FakeData, Training, count_parameters, size_names

__all__ = ["UNITS", "Runner"]

UNITS = {
    "step_time": "s",
    "loss": "1",
    "parameters": "count",
    "model_bytes": "bytes",
    "peak_allocated": "bytes per device",
    "peak_reserved": "bytes per device",
}
FLOAT_BYTES = 4


class Runner:
    """Run experiments at one scale on some devices, and put every result into a record as soon as it is there."""

    def __init__(
        self,
        devices: Devices,
        recorder: Recorder,
        progress: Progress,
        *,
        scale: str,
        seed: int,
        steps: int | None = None,
    ) -> None:
        """Prepare to run; `steps` replaces the number of timed steps, and the time limit, of speed experiments."""
        self.devices = devices
        self.recorder = recorder
        self.progress = progress
        self.scale = scale
        self.seed = seed
        self.steps = steps
        self.balancer = Balancer(devices)

    def run(self, experiment: Experiment) -> None:
        """Run one experiment."""
        with self.devices.in_use():
            {"speed": self.run_speed, "memory": self.run_memory}[experiment.measures](experiment)

    def plan(self, experiment: Experiment) -> None:
        """Tell the progress display what is to come."""
        scale = experiment.scale(self.scale)
        steps = scale.warmup + self.rounds(scale) if experiment.measures == "speed" else scale.steps
        for row in scale.rows:
            if row.devices <= self.devices.count:
                self.progress.plan(_job(experiment, row), steps, row.work())

    def rounds(self, scale: Scale) -> int:
        """Count the timed steps of each row."""
        return self.steps if self.steps is not None else scale.steps

    # --- speed -------------------------------------------------------------------------------------------------

    def run_speed(self, experiment: Experiment) -> None:
        """Time the rows' steps in turn; a row that did not fit beside the others is timed alone afterwards."""
        scale = experiment.scale(self.scale)
        data = FakeData(scale.rows, self.seed)
        rows = {row.name: row for row in self.runnable(experiment)}
        crowded: list[Row] = []
        trainings: dict[str, Training] = {}
        for row in rows.values():
            failure = self.warm_up(experiment, row, data, trainings)
            if failure is not None and failure.status == "out of memory":
                crowded.append(row)
            self.put_failure(experiment, row, failure)

        taken: dict[str, list[Sample]] = {name: [] for name in trainings}
        rounds = self.rounds(scale)
        limit = scale.seconds if self.steps is None else None
        started = time.monotonic()
        if limit is not None:
            self.progress.limit(experiment.name, limit)

        def enough(done: int) -> bool:
            for name, samples in taken.items():
                self.put_samples(experiment, trainings[name].row, samples)
            self.recorder.save()
            return limit is not None and done >= scale.least_steps and time.monotonic() - started > limit

        def before(done: int, name: str) -> None:
            self.progress.start(
                _job(experiment, rows[name]), f"{experiment.name}: round {done + 1} of {rounds}, {name}"
            )

        try:
            for sample in in_turn(
                trainings, self.devices, rounds=rounds, seed=self.seed, enough=enough, before=before
            ):
                if sample.failure is None:
                    taken[sample.row].append(sample)
                    continue
                if sample.failure.status == "out of memory":
                    crowded.append(rows[sample.row])
                self.put_failure(experiment, trainings.pop(sample.row).row, sample.failure)
                del taken[sample.row]
        finally:
            for name, samples in taken.items():
                self.put_samples(experiment, trainings[name].row, samples)
            self.recorder.save()
        self.progress.stop()

        company = len(trainings) > 0
        trainings.clear()
        if company:
            for row in crowded:
                self.time_alone(experiment, row, data, rounds)
        self.drop_jobs(experiment)

    def warm_up(
        self, experiment: Experiment, row: Row, data: FakeData, trainings: dict[str, Training]
    ) -> Failure | None:
        """Build the row into `trainings` and run its first steps, which are slower than the rest."""
        scale = experiment.scale(self.scale)
        try:
            self.progress.start("", f"{experiment.name}: building {row.name}")
            training = Training(row, self.devices, data, self.balancer, self.seed)
            for _ in range(scale.warmup):
                self.progress.start(_job(experiment, row), f"{experiment.name}: warming up {row.name}")
                time_step(training, self.devices)
        except Exception as error:
            return explain(error)
        finally:
            self.progress.stop()
        trainings[row.name] = training
        return None

    def time_alone(self, experiment: Experiment, row: Row, data: FakeData, rounds: int) -> None:
        """Time a row with nothing else on the devices; its steps belong to no round."""
        self.free()
        trainings: dict[str, Training] = {}
        failure = self.warm_up(experiment, row, data, trainings)
        taken = []
        if failure is None:
            for sample in in_turn(trainings, self.devices, rounds=rounds, seed=self.seed):
                failure = sample.failure
                taken.append(sample)
        if failure is None:
            self.put_samples(experiment, trainings[row.name].row, taken, paired=False)
        else:
            self.put_failure(experiment, row, failure)
        self.recorder.save()

    # --- memory ------------------------------------------------------------------------------------------------

    def run_memory(self, experiment: Experiment) -> None:
        """Count the published models' parameters, then measure each row's peak memory, one row at a time."""
        for row in experiment.scale("paper").rows:
            self.progress.show(f"{experiment.name}: counting the parameters of {row.name}")
            result = self.result(experiment, row, scale="paper", device="meta")
            self.recorder.put(replace(result, values=_model_values(row)))
        self.recorder.save()

        for row in self.runnable(experiment):
            self.free()
            failure = self.measure_memory(experiment, row)
            self.put_failure(experiment, row, failure)
            self.recorder.save()
        self.drop_jobs(experiment)

    def measure_memory(self, experiment: Experiment, row: Row) -> Failure | None:
        """Measure one row's peak memory."""
        scale = experiment.scale(self.scale)

        def before(step: int) -> None:
            text = f"{experiment.name}: {row.name}, step {step + 1} of {scale.steps}"
            self.progress.start(_job(experiment, row), text)

        try:
            self.progress.start("", f"{experiment.name}: building {row.name}")
            training = Training(row, self.devices, FakeData([row], self.seed), self.balancer, self.seed)
            self.free()
            peak = measure_peak(training, self.devices, steps=scale.steps, before=before)
        except Exception as error:
            return explain(error)
        finally:
            self.progress.stop()
        values = {**_model_values(row), "peak_allocated": peak.allocated, "peak_reserved": peak.reserved}
        self.recorder.put(replace(self.result(experiment, training.row), values=values))
        return None

    # --- results -----------------------------------------------------------------------------------------------

    def runnable(self, experiment: Experiment) -> list[Row]:
        """Return the rows for which there are devices, and put down what the others need."""
        rows = []
        for row in experiment.scale(self.scale).rows:
            if row.devices <= self.devices.count:
                rows.append(row)
            result = self.result(experiment, row)
            waiting = replace(result, status="not run", reason="not run")
            lacking = replace(result, status="needs devices", reason=f"needs {row.devices} devices")
            self.recorder.put(waiting if row.devices <= self.devices.count else lacking)
        self.recorder.save()
        return rows

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
            published=None if row.published is None else f"{experiment.table}/{row.published}",
        )

    def put_samples(self, experiment: Experiment, row: Row, samples: Sequence[Sample], paired: bool = True) -> None:
        """Put down a row's timed steps, once there are any."""
        if not samples:
            return
        finite = all(math.isfinite(sample.loss) for sample in samples)
        series = {"step_time": [sample.seconds for sample in samples]}
        if finite:
            series["loss"] = [sample.loss for sample in samples]
        if paired:
            series["round"] = [float(sample.round) for sample in samples]
        self.recorder.put(replace(self.result(experiment, row), samples=series))

    def put_failure(self, experiment: Experiment, row: Row, failure: Failure | None) -> None:
        """Put down that a row did not succeed, where it did not."""
        if failure is not None:
            self.recorder.put(replace(self.result(experiment, row), status=failure.status, reason=failure.reason))
            self.progress.drop(_job(experiment, row))

    def drop_jobs(self, experiment: Experiment) -> None:
        """Expect nothing more of an experiment."""
        for row in experiment.scale(self.scale).rows:
            self.progress.drop(_job(experiment, row))

    def free(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.devices.kind == "cuda":
            torch.cuda.empty_cache()


def _job(experiment: Experiment, row: Row) -> str:
    return f"{experiment.name} {row.name}"


def _model_values(row: Row) -> dict[str, int]:
    """Count the model's parameters, and the bytes of parameters, gradients and optimizer state."""
    parameters = count_parameters(row)
    return {"parameters": parameters, "model_bytes": parameters * FLOAT_BYTES * (2 + row.optimizer.state)}
