"""Simulated devices: streams with clocks, as stand-ins for those of GPUs.

`cpu:0`, `cpu:1`, … are devices. A stream logs its calls and executes work in the order of submission. Its clock is the
time at which all submitted work has ended; the host takes no time, and may wait. A copy occupies the current streams of
both its devices.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torchgpipe.distributed.wires.cuda
import torchgpipe.engine.graph
import torchgpipe.tensors.copy


class Event(NamedTuple):
    name: str
    clock: float
    work: Any = None

    def synchronize(self) -> None:
        """Wait on the host, only for work that two ranks do together: other work takes no real time."""
        if self.work is not None:
            self.work.wait()


@dataclass(eq=False)
class Stream:
    name: str
    device: torch.device
    streams: "Streams"
    clock: float = 0.0
    work: Any = None

    def record_event(self, event: Any = None) -> Event:
        return Event(self.name, self.clock, self.work)

    def synchronize(self) -> None:
        self.streams.log.append(f"the host waits for {self.name}")
        if threading.current_thread() is self.streams.host:  # threads of ranks do not hold it up
            self.streams.wait(self)

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.name}")
        self.clock = max(self.clock, event.clock)

    def run(self, seconds: float) -> tuple[float, float]:
        self.clock += seconds
        return self.clock - seconds, self.clock


@dataclass
class Streams:
    """All streams by device, and the seconds of a copy by pair of device indices, the lower one first."""

    patch: pytest.MonkeyPatch
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    compute: dict[torch.device, Stream] = field(default_factory=dict)
    others: list[Stream] = field(default_factory=list)
    thread: threading.local = field(default_factory=threading.local)
    host: threading.Thread = field(default_factory=threading.current_thread)

    def __post_init__(self) -> None:
        """Patch the library's streams with simulated ones. Only copies of tensors are real."""
        to, modules = (
            Tensor.to,
            (torchgpipe.tensors.copy, torchgpipe.engine.graph, torchgpipe.distributed.wires.cuda),
        )

        def copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.current and args and isinstance(args[0], torch.device):
                self.copy(args[0])
                if not kwargs.get("non_blocking"):
                    self.wait(*self.current[-2:])
            return to(x, *args, **kwargs)

        for name, ours in (
            ("new_stream", self.new),
            ("current_stream", self.of),
            ("using", self.using),
        ):
            for module in modules:
                self.patch.setattr(module, name, ours, raising=False)
        self.patch.setattr(torch.cuda, "Event", lambda **_: None)
        self.patch.setattr(torch.cuda, "synchronize", lambda device=None: self.synchronize())
        self.patch.setattr(Tensor, "to", copied)
        self.patch.setattr(
            Tensor, "record_stream", lambda x, s: self.log.append(f"memory is used by {s.name}")
        )

    @property
    def current(self) -> list[Stream]:
        """The current streams of this thread, the innermost last."""
        return getattr(self.thread, "current", [])

    def of(self, device: torch.device) -> Stream | None:
        """Return the device's current stream."""
        if device.type == "cpu" and device not in self.compute:
            self.compute[device] = Stream(f"{device} compute", device, self)
        return next(
            (s for s in reversed(self.current) if s.device == device), self.compute.get(device)
        )

    def new(self, device: torch.device) -> Stream | None:
        if device.type != "cpu":
            return None
        self.others.append(Stream(f"{device} copies", device, self))
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

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        self.wait(*self.compute.values(), *self.others)

    def wait(self, *streams: Stream) -> None:
        """Wait on the host for some streams: all that it submits later starts after that."""
        end = max(stream.clock for stream in streams)
        for stream in (*self.compute.values(), *self.others):
            stream.clock = max(stream.clock, end)
