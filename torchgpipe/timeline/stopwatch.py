"""Note when each task, and each copy between devices, starts and ends on its device.

On a CPU a task starts and ends when its thread begins and ends it. A CUDA device works on its own, so events are
recorded on its stream before and after the task, and their times are read once everything has ended.
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
            return float(origin.event.elapsed_time(self.event)) / 1000  # from milliseconds
        return self.time - origin.time

    def work_since(self, origin: Mark) -> float:
        """Return the seconds that the device worked since another mark of the same thread.

        On a CPU that is the thread's CPU time, so that what other programs take of the clock does not count.
        """
        return self.since(origin) if self.event is not None else self.work - origin.work


class Timed(NamedTuple):
    """Hold a task, and marks at its start and its end."""

    task: Task
    start: Mark
    end: Mark


class Stopwatch:
    """An observer that remembers all tasks, in the order in which they end; `devices` are those of the partitions.

    Attributes:
        tasks: what it has seen.
    """

    def __init__(self, devices: dict[int, torch.device]) -> None:
        self._devices = devices
        self._synchronize()
        # The devices are idle, so they pass these marks at once, within microseconds of each other.
        self._origins = {device: Mark(device) for device in devices.values()}
        self.tasks: list[Timed] = []  # appended to by several threads, which is safe

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        """Note when a task starts and ends."""
        device = self._devices[task.partition]
        start = Mark(device)
        try:
            yield
        finally:
            self.tasks.append(Timed(task, start, Mark(device)))

    def events(self) -> Sequence[Event]:
        """Wait for the devices, and return when each task ran, in seconds of `time.perf_counter`."""
        self._synchronize()
        events = []
        for task, start, end in self.tasks:
            origin = self._origins[self._devices[task.partition]]
            events.append(
                Event(*task, origin.time + start.since(origin), origin.time + end.since(origin))
            )
        return events

    def _synchronize(self) -> None:
        for device in {*self._devices.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
