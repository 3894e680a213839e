"""Measure when each task, and each copy between devices, starts and ends on its device.

On a CPU, a task starts and ends when its thread starts and ends it. A GPU does the work later,
while the thread continues. So for a GPU, events are recorded on the GPU's stream before and after
the task. The times of these events are read after all work has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torchgpipe.schedules.replay import Event
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.observe import Task


class Mark:
    """A point in time of the calling thread and, on a GPU, also of the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event = accelerator.time_now(device)
        self.work = time.thread_time()

    def since(self, origin: Mark) -> float:
        """Return the seconds from an earlier mark of the same device to this mark."""
        if self.event is not None and origin.event is not None:
            return origin.event.elapsed_time(self.event) / 1000  # from milliseconds
        return self.time - origin.time

    def work_since(self, origin: Mark) -> float:
        """Return for how many seconds the device has worked since an earlier mark.

        On a CPU, this is the CPU time of the thread, so time in which other programs use the CPU
        does not count. Both marks have to be from the same thread.
        """
        if self.event is not None:
            return self.since(origin)
        return self.work - origin.work


class Timed(NamedTuple):
    """A task, with a mark at its start and a mark at its end."""

    task: Task
    start: Mark
    end: Mark


class Stopwatch:
    """An observer of a pipeline that records when each task runs.

    Args:
        devices: The device of each partition.

    Attributes:
        tasks: All tasks so far, in the order in which they ended.
    """

    def __init__(self, devices: dict[int, torch.device]) -> None:
        self._devices = devices
        accelerator.synchronize({*devices.values()})
        # The devices are idle, so all of these marks are within microseconds of each other.
        self._origins = {device: Mark(device) for device in devices.values()}
        self.tasks: list[Timed] = []  # several threads append to this list, which is safe

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        """Record when a task starts and ends."""
        device = self._devices[task.partition]
        start = Mark(device)
        try:
            yield
        finally:
            self.tasks.append(Timed(task, start, Mark(device)))

    def events(self) -> Sequence[Event]:
        """Wait until the devices have done all work, and return when each task started and ended.

        Times are in seconds of `time.perf_counter`.
        """
        accelerator.synchronize({*self._devices.values()})
        events = []
        for task, start, end in self.tasks:
            origin = self._origins[self._devices[task.partition]]
            started = origin.time + start.since(origin)
            ended = origin.time + end.since(origin)
            events.append(Event(*task, started, ended))
        return events
