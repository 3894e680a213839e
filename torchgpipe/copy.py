"""Copies between devices, on CUDA streams of their own (torchgpipe paper, section 3.2.4).

A tensor that goes from one device to another passes three nodes of the autograd graph:

    depart   once its task is issued: the source's compute stream is marked by an event
    copy     on the streams of this way, which wait for that event
    arrive   before the task that needs it is issued: the target's compute stream waits for the copy

Backward mirrors them: arrive, copy, depart. So a copy overlaps the computation of both devices, and what comes
between departure and copy in the graph (a recomputation) is launched before the source's compute stream has to
wait for the gradient. Memory that is used on another stream than the one it was allocated on is recorded there.

A stream works in the order in which it was given work, so one that waits holds up all that comes later. Nothing may
therefore wait for more than it needs: every wait is for an event, all tensors of a task depart and arrive together, and
no two ways share a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchgpipe.observe import Observer, observed
from torchgpipe.stage import Flat

__all__ = ["CopyStreams", "Dock", "Route", "current_stream", "using"]


class CopyStreams:
    """The streams of a pipeline beside the compute streams, on `devices`, one for each partition.

    There are none off CUDA, or where copies shall use the compute streams.
    """

    def __init__(self, devices: Sequence[torch.device], *, enabled: bool = True) -> None:
        self.devices = list(devices)
        self._enabled = enabled
        self._made: dict[tuple[int, ...], torch.cuda.Stream | None] = {}

    def between(self, source: int, target: int) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
        """Return the streams at both ends of the way from partition `source` to `target`."""
        return self._stream(source, source, target), self._stream(target, source, target)

    def aside(self, partition: int) -> torch.cuda.Stream | None:
        """Return the stream for nodes of a partition that only order: it has no work, and so keeps none waiting."""
        return self._stream(partition)

    def _stream(self, partition: int, *way: int) -> torch.cuda.Stream | None:
        key = (partition, *way)
        if self._enabled and key not in self._made:
            self._made[key] = new_stream(self.devices[partition])
        return self._made.get(key)


class Dock:
    """Where the tensors of one task leave for other devices, or arrive from them; their gradients the other way.

    The compute stream is the one that is current when it is made.
    """

    __slots__ = ("_compute", "_expected", "_left")

    def __init__(self, device: torch.device) -> None:
        self._compute = current_stream(device)
        self._left: torch.cuda.Event | None = None
        self._expected: list[torch.cuda.Event] = []

    def depart(self, outputs: Flat, routes: Sequence[Route]) -> Flat:
        """Let the copies of a task's outputs wait for what is issued by now."""
        away = next((r for x, r in zip(outputs, routes, strict=True) if x is not None and r.streamed), None)
        if away is None:
            return outputs
        self._leave()
        with away.departing():
            return _pass(outputs, self._meet)

    def arrive(self, inputs: Flat) -> Flat:
        """Let what is issued from now on wait for the copies that were made of a task's inputs."""
        if not self._expected:
            return inputs
        self._meet(inputs)
        return _pass(inputs, lambda _: self._leave())

    def hold(self, stream: torch.cuda.Stream | None, x: Tensor) -> None:
        """Let a copy stream wait for `x`, which left."""
        if stream is not None and self._left is not None:
            stream.wait_event(self._left)
            x.record_stream(stream)

    def expect(self, stream: torch.cuda.Stream | None) -> None:
        """Expect what a copy stream was given to do."""
        if stream is not None and self._compute is not None:
            self._expected.append(stream.record_event())

    def _leave(self) -> None:
        if self._compute is not None:
            self._left = self._compute.record_event()

    def _meet(self, tensors: Flat) -> None:
        if self._compute is None:
            return
        for event in self._expected:
            self._compute.wait_event(event)
        self._expected.clear()
        for x in tensors:
            if x is not None:
                x.record_stream(self._compute)


class Route:
    """The way from one partition's device to another's, for the length of a mini-batch.

    Without streams of its own, it uses the compute streams that are current when it is made. `observer` is that of
    copies.
    """

    def __init__(self, streams: CopyStreams, source: int, target: int, observer: Observer | None = None) -> None:
        self._ends = source, target
        self._observer = observer
        self.source, self.target = streams.devices[source], streams.devices[target]
        self.elsewhere = self.source != self.target
        self._outbound, self._inbound = streams.between(source, target) if self.elsewhere else (None, None)
        self.streamed = self._outbound is not None or self._inbound is not None
        self._aside = streams.aside(source) if self.streamed else None
        self._current = self._outbound or current_stream(self.source), self._inbound or current_stream(self.target)

    def departing(self) -> AbstractContextManager[object]:
        """Create autograd nodes that belong between departure and copy."""
        # Autograd lets the stream of a node wait for the streams of those that it gets gradients from. Here that must
        # be neither the compute stream, which would wait before the recomputation, nor a copy stream, which may have
        # been given later copies.
        return using(self._aside)

    def copy(self, x: Tensor, i: int, departure: Dock, arrival: Dock) -> Tensor:
        """Copy `x`, of micro-batch `i`, to the target."""
        if not self.elsewhere:
            return x
        with using(*self._current):
            y: Tensor = _Copy.apply(self, i, departure, arrival, x)
        return y

    def move(self, x: Tensor, i: int, departure: Dock, arrival: Dock, *, back: bool = False) -> Tensor:
        """Copy `x` to the target, or `back`, on the copy streams; a copy to the host is complete when this returns."""
        sender, device = self._ends[back], self.source if back else self.target
        here, there = (self._inbound, self._outbound) if back else (self._outbound, self._inbound)
        departure.hold(here, x)
        with using(*self._current), observed(self._observer, "copy", i, sender):
            y = x.to(device, non_blocking=device.type == "cuda")
        arrival.expect(there)
        return y


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, i: int, departure: Dock, arrival: Dock, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.route, ctx.i, ctx.departure, ctx.arrival = route, i, departure, arrival
        return route.move(x, i, departure, arrival)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is not None:
            grad = ctx.route.move(grad, ctx.i, ctx.arrival, ctx.departure, back=True)
        return None, None, None, None, grad


def _pass(tensors: Flat, backward: Callable[[Flat], None]) -> Flat:
    """Return `tensors` such that all their gradients come together, and `backward` is called on them."""
    taking = [x for x in tensors if x is not None and x.requires_grad]
    if not taking or not torch.is_grad_enabled():
        return tensors
    passed = iter(_Pass.apply(backward, *taking))
    return tuple(next(passed) if x is not None and x.requires_grad else x for x in tensors)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Callable[[Flat], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backward_of_all = backward
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.backward_of_all(grads)
        return None, *grads


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream of the device, `None` off CUDA."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the device's current stream, `None` off CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def using(*streams: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make `streams` the current ones of their devices; pass over `None`."""
    on = [stream for stream in streams if stream is not None]
    return _using(on) if on else _ANYWHERE


_ANYWHERE = nullcontext()


@contextmanager
def _using(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
