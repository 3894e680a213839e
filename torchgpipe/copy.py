"""Copies between devices, on CUDA streams of their own (torchgpipe paper, section 3.2.4).

A tensor that goes from one device to another passes three nodes of the autograd graph:

    depart   the outbound copy stream of the source waits for its compute stream
    copy     on the source's outbound and the target's inbound copy stream
    arrive   the target's compute stream waits for its inbound copy stream

Backward mirrors them: arrive, copy, depart. So a copy overlaps the computation of both devices, and what comes
between departure and copy in the graph (a recomputation) is launched before the source's compute stream has to
wait for the gradient. Memory that is used on another stream than the one it was allocated on is recorded there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchgpipe.observe import Observer, observed

__all__ = ["CopyStreams", "Route", "current_stream", "using"]


class CopyStreams:
    """The copy streams of one partition's device; both are `None` off CUDA, or where copies shall use the compute
    stream."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.device = device
        on = enabled and device.type == "cuda"
        self.inbound = _new_stream(device) if on else None
        self.outbound = _new_stream(device) if on else None


class Route:
    """The way from one partition's device to another's, for the length of a mini-batch.

    The compute streams are the streams that are current when it is made. `ends` are the indices of the two
    partitions, for the `observer` of copies.
    """

    def __init__(
        self,
        source: CopyStreams,
        target: CopyStreams,
        ends: tuple[int, int] = (0, 0),
        observer: Observer | None = None,
    ) -> None:
        self._ends = ends
        self._observer = observer
        self.source = source.device
        self.target = target.device
        self.elsewhere = source.device != target.device
        self._compute_source = current_stream(source.device)
        self._compute_target = current_stream(target.device)
        self._outbound = source.outbound or self._compute_source
        self._inbound = target.inbound or self._compute_target

    def depart(self, x: Tensor) -> Tensor:
        """Let the outbound copy stream wait for `x`."""
        if not self.elsewhere or self._outbound is self._compute_source:
            return x
        with using(self._outbound):
            y: Tensor = _Wait.apply(self._compute_source, self._outbound, x)
        return y

    @contextmanager
    def departing(self) -> Iterator[None]:
        """Create autograd nodes that belong between departure and copy."""
        with using(self._outbound if self.elsewhere else None):
            yield

    def copy(self, x: Tensor, i: int = 0) -> Tensor:
        """Copy `x`, of micro-batch `i`, to the target and let the target's compute stream wait for it."""
        if not self.elsewhere:
            return x
        y: Tensor = _Copy.apply(self, i, x)
        if self._inbound is not self._compute_target:
            y = _Wait.apply(self._inbound, self._compute_target, y)
        return y

    def move(self, x: Tensor, target: torch.device, i: int = 0) -> Tensor:
        """Copy `x` to `target` on the copy streams; a copy to the host is complete when this returns."""
        sender = self._ends[0] if target == self.target else self._ends[1]
        with using(self._outbound, self._inbound), observed(self._observer, "copy", i, sender):
            return x.to(target, non_blocking=target.type == "cuda")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, i: int, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.route, ctx.i = route, i
        return route.move(x, route.target, i)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        grad = grads[0]
        return None, None, None if grad is None else ctx.route.move(grad, ctx.route.source, ctx.i)


class _Wait(torch.autograd.Function):
    """Let stream `after` wait for `before` in forward, and `before` for `after` in backward."""

    @staticmethod
    def forward(ctx: Any, before: torch.cuda.Stream, after: torch.cuda.Stream, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.before, ctx.after = before, after
        after.wait_stream(before)
        x.record_stream(after)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        ctx.before.wait_stream(ctx.after)
        grad = grads[0]
        if grad is not None:
            grad.record_stream(ctx.before)
        return None, None, grad


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
