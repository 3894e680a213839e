"""Time the training steps of one row (configuration), and measure how busy its devices are."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from reproduce.error import Error
from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.machine.driver import utilization
from reproduce.records.places import Json
from reproduce.run.engines.failure import explain
from reproduce.run.training import Training, record_tasks
from torchgpipe.plan.predict.replay import Timeline

Samples = dict[str, list[float]]
Values = dict[str, Json]
Watched = tuple[Values, "Timeline | None"]
T = TypeVar("T")
SAMPLING_SECONDS = 0.05  # as published
LEAST_SECONDS = 2.0
MOST_STEPS = 50


def _watch_nothing() -> Watched:
    return {}, None


class MeasuredSteps:
    """The training steps of one row (configuration), which are timed on the row's devices.

    Args:
        row: The row.
        timed: A function that runs a step and returns its time in seconds and its loss.
        watch: A function that runs further steps, which are not timed. It returns the utilization
            of the devices, or the reason why the utilization is not known, and a timeline.

    Attributes:
        runs: The time and the loss of each step. Steps that other programs disturbed can be removed
            from this list.
        losses: The losses of all steps, including the removed ones.
    """

    def __init__(
        self,
        row: Row,
        timed: Callable[[], tuple[float, float]],
        watch: Callable[[], Watched] = _watch_nothing,
    ) -> None:
        self.row = row
        self.watch = watch
        self._timed = timed
        self.runs: list[tuple[float, float]] = []  # seconds and loss
        self.losses: list[float] = []

    def run(self) -> None:
        """Run one more training step, and add its time and its loss to `runs`."""
        torch.manual_seed(len(self.losses))  # so that step k draws the same numbers on each engine
        seconds, loss = self._timed()
        self.runs.append((seconds, loss))
        self.losses.append(loss)

    def samples(self) -> Samples:
        """Return the seconds and losses of all steps in `runs`, as samples for the results."""
        seconds, losses = zip(*self.runs, strict=True)
        return {"step_time": list(seconds), "loss": list(losses)}


def _clocked(devices: Devices, run: Callable[[], T]) -> tuple[T, float, float]:
    """Call `run`; return its result, the clock's time when it began, and the seconds that it took.

    The seconds include the time until the devices have finished their work.
    """
    devices.synchronize()
    started = time.perf_counter()
    found = run()
    devices.synchronize()
    seconds = time.perf_counter() - started
    return found, started, seconds


def time_step(training: Training, devices: Devices) -> tuple[float, float]:
    """Run one whole training step; return its time in seconds and its loss."""
    loss, _, seconds = _clocked(devices, training.step)
    return seconds, float(loss)


def record_step(training: Training, devices: Devices) -> Timeline:
    """Run one whole training step, and return its timeline: the times of all tasks and copies."""
    recorded, started, seconds = _clocked(devices, lambda: record_tasks(training, training.step))
    stopwatch, _ = recorded
    events = []
    for event in stopwatch.events():
        start = event.start - started
        end = event.end - started
        events.append(event._replace(start=start, end=end))
    return Timeline(events, seconds, len(training.devices))


def watch(training: Training, devices: Devices) -> Watched:
    """Run training steps to measure how busy the devices are.

    Return values for the record, and the timeline of one step. The values are the utilization of
    the devices and the bubble. If the utilization is not known, the values contain the reason.
    """
    step = partial(time_step, training, devices)
    driver = partial(ask_driver, training.devices, step) if devices.kind == "cuda" else None
    return watched(lambda: record_step(training, devices), driver)


def watched(
    run: Callable[[], Timeline], driver: Callable[[], list[float]] | None = None
) -> Watched:
    """Run steps to measure how busy the devices are.

    Return values for the record, and the timeline of one step (None if `run` fails). The values are
    the utilization of the devices and the bubble. If `run` or `driver` fails, the values contain
    the reason.

    Args:
        run: A function that runs a step and returns its timeline.
        driver: A function that returns the utilization of each device. If None, the utilization is
            computed from the timeline.
    """
    values: Values = {}
    timeline = None
    try:
        timeline = run()
        values = busy(timeline)
        if driver is not None:
            values["utilization"] = driver()
    except Exception as error:
        values.pop("utilization", None)
        values["utilization_problem"] = explain(error).reason
    return values, timeline


def busy(timeline: Timeline) -> Values:
    """Return the share of the step in which each device worked (utilization), and the bubble."""
    shares: list[Json] = []
    for partition in range(timeline.partitions):
        share = timeline.busy(partition) / timeline.seconds
        shares.append(min(1.0, share))
    return {"utilization": shares, "bubble": timeline.bubble}


def ask_driver(devices: Sequence[torch.device], step: Callable[[], object]) -> list[float]:
    """Run steps for some seconds; return each CUDA device's mean utilization, from 0 to 1.

    The driver (NVML) reports the utilization: in what share of a short period a kernel ran. The
    driver is asked every 0.05 seconds, as in the published runs.

    Raises:
        Error: The driver does not report the utilization, or the steps took less than 0.05 seconds.
    """
    for device in devices:
        if utilization(device) is None:
            raise Error(
                f"utilization is not available: the driver (NVML) does not report it for {device}"
            )

    samples: list[list[float]] = [[] for _ in devices]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLING_SECONDS):
            for device, taken in zip(devices, samples, strict=True):
                share = utilization(device)
                if share is not None:
                    taken.append(share)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        _run_some_seconds(step)
    finally:
        over.set()
        sampler.join()
    if not all(samples):
        raise Error(
            "utilization is not available: the driver is asked for it only every "
            f"{SAMPLING_SECONDS} s, and all steps together took less than {SAMPLING_SECONDS} s"
        )
    return [statistics.mean(taken) for taken in samples]


def _run_some_seconds(step: Callable[[], object]) -> None:
    started = time.monotonic()
    for _ in range(MOST_STEPS):
        step()
        if time.monotonic() - started > LEAST_SECONDS:
            break
