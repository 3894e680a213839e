"""Watch one training step: when each task, and each copy between devices, starts and ends on its device.

On a CPU a task takes as long as its thread is in it. On CUDA the device works on its own, so events are recorded
on its stream before and after the task, and their times are read once everything has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from reproduce.machine.devices import Devices
from reproduce.run.training import Training
from torchgpipe.observe import Task

__all__ = ["Span", "StepTimeline", "watch_step"]


class Span(NamedTuple):
    """Place a task in time, in seconds since the step started."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class StepTimeline:
    """Hold the spans of a step of so many `seconds`, in the order in which they ended, on so many `devices`."""

    spans: list[Span]
    seconds: float
    devices: int

    @property
    def tasks(self) -> list[Span]:
        """List what computes."""
        return [span for span in self.spans if span.task.kind != "copy"]

    @property
    def window(self) -> tuple[float, float]:
        """Give the time from the first task's start to the last one's end: the step but for the optimizer's part."""
        tasks = self.tasks
        return (min(span.start for span in tasks), max(span.end for span in tasks)) if tasks else (0.0, 0.0)

    def busy_seconds(self, device: int) -> float:
        """Add up the time that a device spent in tasks. Its tasks do not overlap: it runs one at a time."""
        return sum(span.end - span.start for span in self.tasks if span.task.partition == device)

    def busy(self) -> list[float]:
        """Return, for each device, the share of the whole step that it spent in tasks, from 0 to 1."""
        return [min(1.0, self.busy_seconds(device) / self.seconds) for device in range(self.devices)]

    @property
    def bubble(self) -> float:
        """Give the share of the devices' time, from the first task to the last, in which they waited."""
        start, end = self.window
        if end <= start:
            return 0.0
        busy = sum(self.busy_seconds(device) for device in range(self.devices))
        return max(0.0, 1 - busy / (self.devices * (end - start)))


def watch_step(training: Training, devices: Devices) -> StepTimeline:
    """Run one whole step and return its timeline."""
    clock: Clock = _CudaClock(training.devices) if devices.kind == "cuda" else _CpuClock()
    devices.synchronize()
    clock.begin()
    with training.observed(clock.watch):
        training.step()
    devices.synchronize()
    seconds = clock.seconds()
    return StepTimeline(clock.spans(), seconds, len(training.devices))


class Clock(Protocol):
    """What times the tasks of a step."""

    def begin(self) -> None: ...
    def watch(self, task: Task) -> contextlib.AbstractContextManager[None]: ...
    def seconds(self) -> float: ...
    def spans(self) -> list[Span]: ...


class _CpuClock:
    def __init__(self) -> None:
        self.started = 0.0
        self.noted: list[Span] = []  # appended to by several threads, which is safe

    def begin(self) -> None:
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def watch(self, task: Task) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.noted.append(Span(task, start - self.started, time.perf_counter() - self.started))

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def spans(self) -> list[Span]:
        return self.noted


class _CudaClock(_CpuClock):
    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.events: list[tuple[Task, torch.cuda.Event, torch.cuda.Event]] = []

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
            self.events.append((task, start, self._record(device)))

    def spans(self) -> list[Span]:
        return [
            Span(task, *(self.origins[task.partition].elapsed_time(event) / 1000 for event in (start, end)))
            for task, start, end in self.events
        ]

    @staticmethod
    def _record(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
