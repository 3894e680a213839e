"""Simulate devices for tests: streams with simulated clocks replace the streams of GPUs.

The simulated devices are `cpu:0`, `cpu:1`, …. A stream runs its work in the order of submission.
The clock of a stream is the simulated time at which all its work so far has ended. The host itself
takes no time, but can wait for streams. A copy occupies the current stream of the source device and
the current stream of the target device. A log notes who waits for whom, and which stream uses
memory.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchgpipe.tensors import accelerator


class Event(NamedTuple):
    name: str
    clock: float
    work: Any = None

    def synchronize(self) -> None:
        """Make the host wait for the event.

        The host really waits only for a transfer between two ranks, which may still be going on.
        All other simulated work is done as soon as it is submitted.
        """
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
        if threading.current_thread() is self.streams.host:  # a rank's thread is not the host
            self.streams.wait(self)

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.name}")
        self.clock = max(self.clock, event.clock)

    def run(self, seconds: float) -> tuple[float, float]:
        """Advance this stream's simulated clock by some seconds, as work on the stream would.

        Return the times when the work starts and ends.
        """
        self.clock += seconds
        start = self.clock - seconds
        return start, self.clock


@dataclass
class Streams:
    """All simulated streams.

    Args:
        patch: The pytest fixture by which the library's streams are replaced until the test ends.
        seconds: Maps two devices to the seconds of a copy between them. A key has the indices of
            the devices, the lower index first. Copies between devices without a key take no time.
    """

    patch: pytest.MonkeyPatch
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    compute: dict[torch.device, Stream] = field(default_factory=dict)
    others: list[Stream] = field(default_factory=list)
    thread: threading.local = field(default_factory=threading.local)
    host: threading.Thread = field(default_factory=threading.current_thread)

    def __post_init__(self) -> None:
        """Replace the library's streams by simulated streams until the test ends."""
        to = Tensor.to

        def copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.current and args and isinstance(args[0], torch.device):
                self.copy(args[0])
                if not kwargs.get("non_blocking"):
                    self.wait(*self.current[-2:])
            return to(x, *args, **kwargs)

        def used(x: Tensor, stream: Stream) -> None:
            self.log.append(f"memory is used by {stream.name}")

        replace = self.patch.setattr
        replace(accelerator, "new_stream", self.new)
        replace(accelerator, "current_stream", self.of)
        replace(accelerator, "using", self.using)
        replace(accelerator, "sleep_until_now", self.event)
        replace(torch.cuda, "synchronize", lambda device=None: self.synchronize())
        replace(Tensor, "to", copied)
        replace(Tensor, "record_stream", used)

    @property
    def current(self) -> list[Stream]:
        """The streams that this thread has made current by `using`. The newest one is the last."""
        return getattr(self.thread, "current", [])

    def of(self, device: torch.device) -> Stream | None:
        """Return the device's current stream."""
        if device.type == "cpu" and device not in self.compute:
            self.compute[device] = Stream(f"{device} compute", device, self)
        for stream in reversed(self.current):
            if stream.device == device:
                return stream
        return self.compute.get(device)

    def new(self, device: torch.device) -> Stream | None:
        """Return a new stream for copies to or from the device."""
        if device.type != "cpu":
            return None
        stream = Stream(f"{device} copies", device, self)
        self.others.append(stream)
        return stream

    def event(self, device: torch.device) -> Event:
        """Record an event on the device's current stream; return the event, to wait for it."""
        stream = self.of(device)
        assert stream is not None
        return stream.record_event()

    @contextmanager
    def using(self, *streams: Stream | None) -> Iterator[None]:
        """Make the given streams the current streams of this thread in the `with` block."""
        before = self.current
        used = [stream for stream in streams if stream is not None]
        self.thread.current = before + used
        yield
        self.thread.current = before

    def copy(self, target: torch.device) -> None:
        """Simulate a copy to device `target`.

        The copy occupies two streams, one of the source device and one of the target device, which
        `using` has made current. It begins when both are free, and sets both clocks to its end.
        """
        ends = self.current[-2:]
        names, devices, clocks = [], [], []
        for stream in ends:
            names.append(stream.name)
            devices.append(stream.device.index)
            clocks.append(stream.clock)
        self.log.append(f"copy to {target} on {' and '.join(names)}")
        pair = min(devices), max(devices)
        end = max(clocks) + self.seconds.get(pair, 0.0)
        for stream in ends:
            stream.clock = end

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        self.wait(*self.compute.values(), *self.others)

    def wait(self, *streams: Stream) -> None:
        """Make the host wait for some streams.

        Whatever the host submits later, to any stream, starts after the work of these streams.
        """
        end = max(stream.clock for stream in streams)
        for stream in (*self.compute.values(), *self.others):
            stream.clock = max(stream.clock, end)
