"""Watch one training step: when each task, and each copy between devices, starts and ends on its device.

On a CPU a task takes as long as its thread is in it. On CUDA the device works on its own, so events are recorded
on its stream before and after the task, and their times are read once everything has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from reproduce.machine.devices import Devices
from reproduce.run.training import Training
from torchgpipe.observe import Task
from torchgpipe.plan.replay import Event, Timeline


class Watched(NamedTuple):
    """Hold a task, and marks at its start and its end."""

    task: Task
    start: Mark
    end: Mark


def watch_step(training: Training, devices: Devices) -> Timeline:
    """Run one whole step and return its timeline."""
    devices.synchronize()
    # The devices are idle, so they pass these marks at once, within microseconds of each other.
    origins = {device: Mark(device) for device in training.devices}
    started = time.perf_counter()
    watched = watch_tasks(training, training.step)
    devices.synchronize()
    seconds = time.perf_counter() - started

    events = []
    for task, start, end in watched:
        origin = origins[training.devices[task.partition]]
        events.append(Event(*task, start.since(origin), end.since(origin)))
    return Timeline(events, seconds, len(training.devices))


def watch_tasks(training: Training, run: Callable[[], object]) -> list[Watched]:
    """Return every task of what `run` runs, in the order in which they ended."""
    watched: list[Watched] = []  # appended to by several threads, which is safe

    @contextlib.contextmanager
    def watch(task: Task) -> Iterator[None]:
        device = training.devices[task.partition]
        start = Mark(device)
        try:
            yield
        finally:
            watched.append(Watched(task, start, Mark(device)))

    with training.observed(watch):
        run()
    return watched


class Mark:
    """Note when the running thread is here, and on CUDA when the device's current stream is."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))
        self.work = time.thread_time()

    def since(self, origin: Mark) -> float:
        """Return the seconds from another mark of the same device to this one."""
        if self.event is not None and origin.event is not None:
            milliseconds: float = origin.event.elapsed_time(self.event)
            return milliseconds / 1000
        return self.time - origin.time

    def work_since(self, origin: Mark) -> float:
        """Return the seconds that the device worked since another mark of the same thread.

        On a CPU that is the thread's CPU time, so that what other programs take of the clock does not count.
        """
        return self.since(origin) if self.event is not None else self.work - origin.work
