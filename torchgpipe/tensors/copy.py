"""Copies between devices, on CUDA streams of their own (torchgpipe paper, section 3.2.4).

All tensors that a task sends to another device are copied together, by one node of the autograd graph:

    the task ends      the source's compute stream records an event             `StreamFence.leave`
    the copy begins    a copy stream of either device waits for that event      `hold`
    the copy ends      the target's copy stream records an event                `expect`
    the next begins    the target's compute stream waits for that event         `arrive`

In backward, gradients are copied back in the same way. So a copy overlaps the computation of both devices. Memory that
is used on another stream than the one it was allocated on is recorded there.

A stream that waits holds up all later work on it. So it waits for events, not for other streams' later work, and no two
paths share a stream.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from torchgpipe.tensors.microbatch import Flat, moved
from torchgpipe.tensors.observe import NOTHING, Observer, observed


class StreamFence:
    """The side of a task where inputs arrive, or that where outputs leave: the waits that are listed above.

    Gradients of inputs leave in backward, and gradients of outputs arrive. The compute stream is the one that is
    current when the fence is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = current_stream(device)
        self._left: torch.cuda.Event | None = None
        self._expected: list[torch.cuda.Event] = []

    def leave(self) -> None:
        """Record an event on the compute stream: what leaves is ready when the work up to here is done."""
        if self._compute is not None:
            self._left = self._compute.record_event()

    def arrive(self, tensors: Flat) -> None:
        """Let the compute stream wait until copies have ended, which `tensors` are the results of."""
        if self._compute is not None and self._expected:
            for event in self._expected:
                self._compute.wait_event(event)
            _keep(tensors, self._compute)
            self._expected.clear()

    def hold(self, stream: torch.cuda.Stream | None, tensors: Flat) -> None:
        """Let a copy stream wait until `tensors`, which leave, are ready."""
        if stream is not None and self._left is not None:
            stream.wait_event(self._left)
            _keep(tensors, stream)

    def expect(self, stream: torch.cuda.Stream | None) -> None:
        """Record an event on a copy stream: what arrives is there when the work up to here is done."""
        if stream is not None and self._compute is not None:
            self._expected.append(stream.record_event())


class CopyPath:
    """The way from the device of partition `source` to that of `target`.

    On CUDA it has copy streams of its `own`. Without them it uses the streams that are current when it copies.
    """

    def __init__(
        self, devices: Sequence[torch.device], source: int, target: int, *, own: bool = True
    ) -> None:
        self._ends, self._devices = (source, target), (devices[source], devices[target])
        self.elsewhere = devices[source] != devices[target]
        self._own = [
            new_stream(device) if own and self.elsewhere else None for device in self._devices
        ]

    def copy(
        self,
        tensors: Flat,
        i: int,
        departure: StreamFence,
        arrival: StreamFence,
        tie: Tensor | None = None,
        observer: Observer | None = None,
    ) -> Flat:
        """Copy `tensors`, of micro-batch `i`, to the target. In backward, the task that made `tie` comes after it."""
        if not self.elsewhere:
            return tensors
        streams = [
            own or current_stream(device)
            for own, device in zip(self._own, self._devices, strict=True)
        ]
        with using(*streams):
            forth = partial(self.move, i, departure, arrival, False, observer)
            back = partial(self.move, i, arrival, departure, True, observer)
            return cast(Flat, _Copy.apply(forth, back, streams, tie, *tensors))

    def move(
        self,
        i: int,
        departure: StreamFence,
        arrival: StreamFence,
        back: bool,
        observer: Observer | None,
        tensors: Flat,
    ) -> Flat:
        """Copy to the target, or `back`, on the streams that are current; a copy to the host is complete at return."""
        here, there = (1, 0) if back else (0, 1)
        departure.hold(self._own[here], tensors)
        device = self._devices[there]
        with observed(observer, "copy", i, self._ends[here]):
            copies = moved(tensors, device, non_blocking=current_stream(device) is not None)
        arrival.expect(self._own[there])
        return copies


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forth: Any, back: Any, streams: Any, tie: Tensor | None, *tensors: Tensor | None
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.streams = back, streams
        copies: Flat = forth(tensors)
        needs = ctx.needs_input_grad[4:]
        ctx.mark_non_differentiable(
            *(y for y, n in zip(copies, needs, strict=True) if y is not None and not n)
        )
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * (4 + len(grads))
        with using(*ctx.streams):
            return None, None, None, None, *ctx.back(grads)


def _keep(tensors: Flat, stream: torch.cuda.Stream) -> None:
    """Keep the memory of `tensors` until `stream` has done what it was given. CPU tensors are skipped."""
    for x in tensors:
        if x is not None and x.device.type == stream.device.type:
            x.record_stream(stream)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream of the device, `None` off CUDA."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the device's current stream, `None` off CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def using(*streams: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make `streams` the current ones of their devices, until the context that is returned ends; pass over `None`."""
    on = [torch.cuda.stream(stream) for stream in streams if stream is not None]
    stack = ExitStack()
    for each in on:
        stack.enter_context(each)
    return stack if on else NOTHING


NO_FENCE = StreamFence(torch.device("cpu"))
"""The fence of tasks that exchange nothing between devices."""
