"""Watch one training step: when each task, and each copy between devices, starts and ends on its device.

On a CPU a task takes as long as its thread is in it. On CUDA the device works on its own, so events are recorded
on its stream before and after the task, and their times are read once everything has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from reproduce.machine.devices import Devices
from reproduce.run.training import Training
from torchgpipe.observe import Task
from torchgpipe.plan.replay import Event, Timeline


def watch_step(training: Training, devices: Devices) -> Timeline:
    """Run one whole step and return its timeline."""
    clock = _CudaClock(training.devices) if devices.kind == "cuda" else _CpuClock()
    devices.synchronize()
    clock.begin()
    with training.observed(clock.watch):
        training.step()
    devices.synchronize()
    seconds = time.perf_counter() - clock.started
    return Timeline(clock.events(), seconds, len(training.devices))


class _CpuClock:
    def __init__(self) -> None:
        self.started = 0.0
        self.ended: list[Event] = []  # appended to by several threads, which is safe

    def begin(self) -> None:
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def watch(self, task: Task) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ended.append(Event(*task, start - self.started, time.perf_counter() - self.started))

    def events(self) -> list[Event]:
        return self.ended


class _CudaClock(_CpuClock):
    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.recorded: list[tuple[Task, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        # The devices are idle, so these pass at once, within microseconds of each other.
        self.origins = [self._record(device) for device in self.devices]
        super().begin()

    @contextlib.contextmanager
    def watch(self, task: Task) -> Iterator[None]:
        device = self.devices[task.partition]
        start = self._record(device)
        try:
            yield
        finally:
            self.recorded.append((task, start, self._record(device)))

    def events(self) -> list[Event]:
        return [
            Event(*task, *(self.origins[task.partition].elapsed_time(event) / 1000 for event in (start, end)))
            for task, start, end in self.recorded
        ]

    @staticmethod
    def _record(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
