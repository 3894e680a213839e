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
    marks: list[tuple[Task, _Mark, _Mark]] = []  # appended to by several threads, which is safe

    @contextlib.contextmanager
    def watch(task: Task) -> Iterator[None]:
        device = training.devices[task.partition]
        start = _Mark(device)
        try:
            yield
        finally:
            marks.append((task, start, _Mark(device)))

    devices.synchronize()
    # The devices are idle, so they pass these marks at once, within microseconds of each other.
    origins = {device: _Mark(device) for device in training.devices}
    started = time.perf_counter()
    with training.observed(watch):
        training.step()
    devices.synchronize()
    seconds = time.perf_counter() - started

    events = []
    for task, start, end in marks:
        origin = origins[training.devices[task.partition]]
        events.append(Event(*task, start.since(origin), end.since(origin)))
    return Timeline(events, seconds, len(training.devices))


class _Mark:
    """Note when the running thread is here, and on CUDA when the device's current stream is."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))

    def since(self, origin: _Mark) -> float:
        """Return the seconds from another mark of the same device to this one."""
        if self.event is not None and origin.event is not None:
            milliseconds: float = origin.event.elapsed_time(self.event)
            return milliseconds / 1000
        return self.time - origin.time
