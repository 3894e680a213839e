"""Record one training step of this process: when each task, and each copy between devices, runs on its device."""

from __future__ import annotations

import time
from collections.abc import Callable

from reproduce.machine.devices import Devices
from reproduce.run.training import Training
from torchgpipe.plan.replay import Timeline
from torchgpipe.timeline.stopwatch import Stopwatch, Timed


def record_step(training: Training, devices: Devices) -> Timeline:
    """Run one whole step and return its timeline."""
    devices.synchronize()
    started = time.perf_counter()
    stopwatch = _timed(training, training.step)
    devices.synchronize()
    seconds = time.perf_counter() - started
    events = [event._replace(start=event.start - started, end=event.end - started) for event in stopwatch.events()]
    return Timeline(events, seconds, len(training.devices))


def record_tasks(training: Training, run: Callable[[], object]) -> list[Timed]:
    """Return every task of what `run` runs, in the order in which they ended."""
    return _timed(training, run).tasks


def _timed(training: Training, run: Callable[[], object]) -> Stopwatch:
    stopwatch = Stopwatch(dict(enumerate(training.devices)))
    with training.observed(stopwatch):
        run()
    return stopwatch
