"""Stand-ins: a clock for profiles (clock.py), and CUDA streams.

Streams write down what is asked of them and keep a clock. `cpu:0`, `cpu:1`, … are devices.

A stream works in the order in which it was given work. Its clock is when all of that has ended; the host takes no time.
A copy occupies the streams that are current at both of its ends. tests/test_cuda.py runs the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torchgpipe.copy
import torchgpipe.distributed.cuda
import torchgpipe.graph
from torchgpipe.balance import profile
from torchgpipe.plan import timing

from .clock import CLOCK, Clock


class Event(NamedTuple):
    name: str
    clock: float
    work: Any = None

    def synchronize(self) -> None:
        """Let the host wait, for work that two streams do together; all other work has ended."""
        if self.work is not None:
            self.work.wait()


@dataclass(eq=False)
class Stream:
    name: str
    device: torch.device
    log: list[str]
    clock: float = 0.0
    work: Any = None

    def record_event(self, event: Any = None) -> Event:
        return Event(self.name, self.clock, self.work)

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")
        self.clock = max(self.clock, event.clock)

    def run(self, seconds: float) -> tuple[float, float]:
        start = self.clock
        self.clock += seconds
        return start, self.clock


@dataclass
class Streams:
    """All streams by device, and how long a copy takes by the devices' indices, the lower one first."""

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    compute: dict[torch.device, Stream] = field(default_factory=dict)
    others: list[Stream] = field(default_factory=list)
    thread: threading.local = field(default_factory=threading.local)

    @property
    def current(self) -> list[Stream]:
        """The streams that are current in this thread, the latest last."""
        return getattr(self.thread, "current", [])

    def of(self, device: torch.device) -> Stream | None:
        """Return the device's current stream."""
        if device.type == "cpu" and device not in self.compute:
            self.compute[device] = Stream(f"{device} compute", device, self.log)
        return next((s for s in reversed(self.current) if s.device == device), self.compute.get(device))

    def new(self, device: torch.device) -> Stream | None:
        if device.type != "cpu":
            return None
        self.others.append(Stream(f"{device} copies", device, self.log))
        return self.others[-1]

    @contextmanager
    def using(self, *streams: Stream | None) -> Iterator[None]:
        before = self.current
        self.thread.current = [*before, *(stream for stream in streams if stream is not None)]
        yield
        self.thread.current = before

    def copy(self, target: torch.device) -> None:
        ends = self.current[-2:]
        self.log.append(f"copy to {target} on {' and '.join(stream.name for stream in ends)}")
        one, *_, other = sorted([stream.device.index for stream in ends] * 2)
        end = max(stream.clock for stream in ends) + self.seconds.get((one, other), 0.0)
        for stream in ends:
            stream.clock = end

    def synchronize(self) -> float:
        """Let the host wait for all streams; return when it has."""
        all_of_them = [*self.compute.values(), *self.others]
        end = max(stream.clock for stream in all_of_them)
        for stream in all_of_them:
            stream.clock = end
        return end


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Replace streams; nothing that happens with them is real but the copies of tensors."""
    streams = Streams()
    to = Tensor.to

    def copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if streams.current and args and isinstance(args[0], torch.device):
            streams.copy(args[0])
        return to(x, *args, **kwargs)

    for module in (torchgpipe.copy, torchgpipe.distributed.cuda):
        monkeypatch.setattr(module, "new_stream", streams.new)
    for module in (torchgpipe.copy, torchgpipe.graph):
        monkeypatch.setattr(module, "current_stream", streams.of)
    for module in (torchgpipe.copy, torchgpipe.graph, torchgpipe.distributed.cuda):
        monkeypatch.setattr(module, "using", streams.using)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda x, stream: streams.log.append(f"memory is used by {stream.name}")
    )
    return streams


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    CLOCK.start()
    for module in (profile, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)
    return CLOCK
