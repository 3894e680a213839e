"""Estimate how long a step of each row (configuration) takes, before a run starts.

The estimate comes from the first of these sources that exists:

1. An earlier run of the same row on this machine. The estimate is the median time of its steps.
2. An earlier run of another row with the same model on this machine. `Row.work` estimates the cost
   of a step of each row. The time of the other row's step is multiplied by the ratio of the costs.
3. A first timing: a step with a few samples is timed on one device, without a pipeline. Its time is
   multiplied by the ratio of the costs, too.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Record, Result, Run, readable
from reproduce.run.emulation import shortened
from reproduce.run.training import Balancer, FakeData, Training

MOST_SAMPLES = 8
"""The largest number of samples with which a model is timed before the run."""
FOUND = ("balance", "link")
"""Settings that a run can choose itself. They may differ between two runs of the same row."""


class StepTimes:
    """Estimates how long a step of each row (configuration) takes on this machine.

    Attributes:
        sources: Where the estimates so far come from, such as the steps of an earlier run.
    """

    def __init__(
        self, devices: Devices, balancer: Balancer, seed: int, earlier: Sequence[Record] = ()
    ) -> None:
        self.devices = devices
        self.balancer = balancer
        self.seed = seed
        self.earlier = earlier
        self.sources: list[str] = []
        self._units: dict[Hashable, float | None] = {}  # for each model, the seconds of a unit

    def guess(self, result: Result, row: Row, work: float) -> float | None:
        """Estimate how many seconds a step of a row takes; return None if nothing is known.

        Args:
            result: The result that the record will have for the row, with its name and its
                configuration. Earlier records are searched for a result of the same row.
            row: The row (configuration).
            work: The estimated cost of a step of the row, in the unit of `Row.work`.
        """
        model = (row.model, row.input_shape)
        seconds = self._recorded(result, row)
        if seconds is not None:
            self._units.setdefault(model, seconds / work)
            return seconds
        if model not in self._units:
            self._units[model] = self._timed(row)
            if self._units[model] is not None:
                self._note("a first timing of each model")
        unit = self._units[model]
        return None if unit is None else unit * work

    def _recorded(self, result: Result, row: Row) -> float | None:
        """Return the median seconds of a step in the newest earlier run that trained the same row.

        Return None if there is no such run.
        """
        for record in self.earlier:
            for before in record.results:
                if before.key == result.key and _is_same(before, result, row):
                    self._note(f"the steps of {record.name}")
                    samples = before.samples
                    return median(samples.get("work_time") or samples["step_time"])
        return None

    def _timed(self, row: Row) -> float | None:
        """Time a step of a row's model; return the step's seconds divided by its estimated cost.

        `Row.work` estimates the cost. Return None if the step fails, or if the devices are of the
        type `meta`, which computes nothing.
        """
        if self.devices.kind == "meta":
            return None
        samples = min(row.micro_batch_size or row.batch_size, MOST_SAMPLES)
        plain = replace(
            row, batch_size=samples, partitions=None, chunks=None, checkpoint=None, balance=None
        )
        one_thread = replace(self.devices, threads=1)  # as when a row is emulated
        try:
            with one_thread.in_use():
                data = FakeData([plain], self.seed)
                training = Training(plain, self.devices, data, self.balancer, self.seed)
                training.step()
                self.devices.synchronize()
                started = time.perf_counter()
                training.step()
                self.devices.synchronize()
                seconds = time.perf_counter() - started
        except Exception:  # the run itself will tell why the model fails
            return None
        return seconds / plain.work()

    def _note(self, source: str) -> None:
        if source not in self.sources:
            self.sources.append(source)


def _is_same(before: Result, result: Result, row: Row) -> bool:
    """Return whether an earlier run's step times can serve as an estimate for the row.

    They can if the earlier row had the same configuration, and if no other program disturbed its
    steps. Settings that a run finds by itself, such as a profiled balance, may differ.

    Args:
        before: The result of the earlier run.
        result: The result that the record will have for the row, with its configuration.
        row: The row.
    """
    if not before.samples.get("step_time") or before.disturbed:
        return False
    if before.emulated and before.values.get("executed") != (shortened(row).micro_batches or 1):
        return False
    ours = {name: value for name, value in result.config.items() if name not in FOUND}
    theirs = {name: value for name, value in before.config.items() if name not in FOUND}
    return ours == theirs


def earlier_runs(folder: Path, run: Run) -> list[Record]:
    """Return the records (results) of earlier runs on the same machine and devices, newest first.

    Args:
        folder: The folder that is searched for records.
        run: A run that starts now, with its machine and devices.
    """
    found: list[tuple[str, Record]] = []
    for record in readable(folder):
        before = record.run
        if before is not None and _place(before) == _place(run):
            found.append((before.started, record))
    found.sort(key=lambda each: each[0], reverse=True)
    return [record for _, record in found]


def _place(run: Run) -> tuple[object, ...]:
    """Return the machine of a run, and the kind, the number and the threads of its devices."""
    return run.machine, run.device, run.devices, run.threads_per_device
