"""A clock for profiles, and autograd's threads on simulated devices (benchmarks/simulated.py).

NCCL on them is in distributed/threads.py. tests/test_cuda.py runs real streams.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe.engine.graph
from benchmarks.simulated import Streams

from .layers import same


class Clock:
    """A clock that only `spend` advances, and the history of its calls."""

    def start(self) -> None:
        self.now = 0.0
        self.history: list[str] = []

    def spend(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.history.append(what)


CLOCK = Clock()
"""The clock of profiles, with the fixture `clock`."""


def spend(x: Tensor, forward: float, backward: float, name: str = "") -> Tensor:
    """Return `x`; spend `forward` seconds now, and `backward` seconds in backward."""
    CLOCK.spend(forward, f"{name} forward")
    y: Tensor = _Spent.apply(x, backward, f"{name} backward")
    return y


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *backward: Any) -> Tensor:
        ctx.later = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        CLOCK.spend(*ctx.later)
        return grads[0], None, None


class Spend(nn.Module):
    """Spend seconds in forward and in backward. `before` and `after` are applied to input and output."""

    def __init__(
        self,
        forward: float,
        backward: float = 0.0,
        name: str = "",
        *,
        before: Any = same,
        after: Any = same,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seconds, self.name, self.before, self.after = (forward, backward), name, before, after

    def forward(self, x: Any) -> Any:
        return self.after(spend(self.before(x) * self.weight, *self.seconds, self.name))


def backward_by_threads(
    streams: Streams, n: int, turns: Callable[[list[int]], int]
) -> Callable[[Tensor], None]:
    """Return a backward function for `n` partitions that works as PyTorch documents it for CUDA.

    On CUDA autograd has a thread per device, on the CPU only one. A thread may submit work ahead of another: `turns`
    chooses the next thread among those with ready nodes. A node runs in the thread of its device; a CPU node, in
    the thread that called backward (here number `n`). A thread runs the ready node with the highest sequence number. A
    node runs on the stream that was current in its forward. That stream first waits for the streams of the nodes that
    its gradients come from, for all work that they had when these nodes had run.
    """
    made: dict[
        Any, tuple[Any, list[int]]
    ] = {}  # node -> its stream, positions of its tensor arguments
    at = [0]
    task = torchgpipe.engine.graph._MiniBatch.task

    def noted_task(self: Any, i: int, j: int) -> None:
        at[0] = j
        task(self, i, j)

    def noted_apply(cls: Any, *args: Any) -> Any:
        result = super(torch.autograd.Function, cls).apply(*args)
        device = torch.device("cpu", args[0][0].index if cls.__name__ == "_Node" else at[0])
        stream = streams.current[-1] if streams.current else streams.of(device)
        tensors = [k for k, x in enumerate(args) if isinstance(x, Tensor)]
        for y in result if isinstance(result, tuple) else (result,):
            if y is not None and y.grad_fn is not None:
                made[y.grad_fn] = (None if cls.__name__ == "_Recomputation" else stream, tensors)
        return result

    streams.patch.setattr(torchgpipe.engine.graph._MiniBatch, "task", noted_task)
    streams.patch.setattr(torch.autograd.Function, "apply", classmethod(noted_apply))

    @torch.no_grad()
    def backward(loss: Tensor) -> None:
        missing, unseen = defaultdict[Any, int](int), [loss.grad_fn]
        while unseen:
            for node, _ in unseen.pop().next_functions:  # type: ignore[union-attr]
                if node not in missing:
                    unseen.extend([node] if node is not None else [])
                missing[node] += 1

        # The current streams of the thread that calls backward.
        callers = [streams.new(torch.device("cpu", j)) for j in range(n)]
        # Nodes after the pipeline run on the last device.
        last = streams.of(torch.device("cpu", n - 1)), [0]
        grads: dict[Any, dict[int, Tensor]] = defaultdict(dict, {loss.grad_fn: {0: torch.ones(())}})
        events: dict[Any, list[Any]] = defaultdict(list)
        ready: dict[int, list[Any]] = {n - 1: [loss.grad_fn]}
        while threads := [thread for thread, nodes in ready.items() if nodes]:
            nodes = ready[turns(threads)]
            node = max(nodes, key=lambda node: node._sequence_nr())
            nodes.remove(node)
            stream, tensors = made.get(node, last)
            for event in events[node]:
                stream.wait_event(event)
            given = [grads[node].get(k) for k in range(len(node._input_metadata))]
            with streams.using(*(callers if stream is None else [stream])):
                found = getattr(node, "apply", node)(*given)
            found = found if isinstance(found, tuple) else (found,)
            if node in made:
                found = tuple(found[k] for k in tensors)
            for (following, k), grad in zip(node.next_functions, found, strict=True):
                if following is None or following.name().endswith("AccumulateGrad"):
                    continue
                home = made.get(following, last)[0]
                if grad is not None:
                    grads[following][k] = grad
                    if home is not stream:
                        events[following].append(stream.record_event())
                missing[following] -= 1
                if not missing[following]:
                    ready.setdefault(n if home is None else home.device.index, []).append(following)

    return backward
