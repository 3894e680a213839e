"""Measure when each task, and each copy between devices, starts and ends on its device.

On a CPU, a task starts and ends when its thread starts and ends it. A CUDA device does the work
later, while the thread continues. So CUDA events are recorded on the stream before and after the
task. The times of these events are read after all work has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torchgpipe.schedules.replay import Event
from torchgpipe.tensors.observe import Task


class Mark:
    """A point in time of the calling thread and, on CUDA, of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))
        self.work = time.thread_time()

    def since(self, origin: Mark) -> float:
        """Return the seconds from an earlier mark of the same device to this mark."""
        if self.event is not None and origin.event is not None:
            return float(origin.event.elapsed_time(self.event)) / 1000  # from milliseconds
        return self.time - origin.time

    def work_since(self, origin: Mark) -> float:
        """Return for how many seconds the device has worked since an earlier mark.

        On a CPU, this is the CPU time of the thread, so time in which other programs use the CPU
        does not count. Both marks have to be of the same thread.
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
        self._synchronize()
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
        self._synchronize()
        events = []
        for task, start, end in self.tasks:
            origin = self._origins[self._devices[task.partition]]
            started = origin.time + start.since(origin)
            ended = origin.time + end.since(origin)
            events.append(Event(*task, started, ended))
        return events

    def _synchronize(self) -> None:
        for device in {*self._devices.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
