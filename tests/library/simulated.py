"""Simulate time for profiles, and autograd's threads for simulated devices.

Streams of simulated devices are in benchmarks/simulated.py, and NCCL is in distributed/threads.py.
Tests with real streams are in tests/test_cuda.py.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.simulated import Streams
from torchgpipe.engine import graph

from .layers import same


class Clock:
    """A clock that advances only in calls of `spend`, and lists these calls in `history`."""

    def start(self) -> None:
        self.now = 0.0
        self.history: list[str] = []

    def spend(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.history.append(what)


CLOCK = Clock()
"""The clock of profiles, with the fixture `clock`."""


def spend(x: Tensor, forward: float, backward: float, name: str = "") -> Tensor:
    """Return a copy of `x`, and let the simulated clock advance.

    Args:
        x: The tensor to copy.
        forward: The seconds by which the clock advances now.
        backward: The seconds by which it advances when the gradient of the copy is computed.
        name: The name for these times in the clock's history.
    """
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
    """A layer whose forward and backward advance the simulated clock.

    The function `before` is applied to the layer's input, and `after` to its output.
    """

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
        self.seconds = (forward, backward)
        self.name = name
        self.before = before
        self.after = after

    def forward(self, x: Any) -> Any:
        y = self.before(x) * self.weight
        return self.after(spend(y, *self.seconds, self.name))


def backward_by_threads(
    streams: Streams, n: int, turns: Callable[[list[int]], int]
) -> Callable[[Tensor], None]:
    """Return a function that runs a backward as autograd does, but with simulated threads.

    The rules are those of PyTorch's documentation:

    1. Each CUDA device has a thread. Nodes on the CPU run in the thread that called backward.
    2. Of the nodes that are ready, a thread first runs the one with the highest sequence number.
    3. A node runs on the stream that was current when its forward ran. Before the node runs, this
       stream waits for the streams on which the node's gradients were computed.

    The simulation runs one node at a time. PyTorch does not specify which thread is faster, so the
    function `turns` chooses the next thread, given the numbers of all threads with ready nodes. The
    threads of the `n` devices have the numbers 0 to n - 1, and the calling thread has the number
    `n`.
    """
    nodes = _Nodes(streams)

    @torch.no_grad()
    def backward(loss: Tensor) -> None:
        _Backward(streams, n, nodes, loss.grad_fn).run(turns)

    return backward


class _Nodes:
    """Records on which stream the forward of each autograd node runs."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.partition = 0
        self.made: dict[Any, tuple[Any, list[int]]] = {}
        """Maps autograd nodes to their streams, and to the positions of their tensor arguments.

        `None` as a stream means the current streams of the thread that calls backward.
        """
        task = graph._MiniBatch.task

        def noted_task(batch: Any, i: int, j: int) -> None:
            self.partition = j
            task(batch, i, j)

        def noted_apply(cls: Any, *args: Any) -> Any:
            result = super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
            self.note(cls.__name__, args, result)
            return result

        streams.patch.setattr(graph._MiniBatch, "task", noted_task)
        streams.patch.setattr(torch.autograd.Function, "apply", classmethod(noted_apply))

    def note(self, function: str, args: tuple[Any, ...], result: Any) -> None:
        stream: Any = None
        if self.streams.current:
            stream = self.streams.current[-1]
        else:
            index = args[0][0].index if function == "_Node" else self.partition
            stream = self.streams.of(torch.device("cpu", index))
        if function == "Recomputation":
            stream = None
        tensors = [k for k, x in enumerate(args) if isinstance(x, Tensor)]
        outputs = result if isinstance(result, tuple) else (result,)
        for y in outputs:
            if y is not None and y.grad_fn is not None:
                self.made[y.grad_fn] = (stream, tensors)


def _uses(root: Any) -> dict[Any, int]:
    """Count for each node of an autograd graph how many gradients it receives."""
    uses: dict[Any, int] = defaultdict(int)
    unseen = [root]
    while unseen:
        for node, _ in unseen.pop().next_functions:
            if node is not None and node not in uses:
                unseen.append(node)
            uses[node] += 1
    return uses


class _Backward:
    """The state of a simulated backward: gradients so far, and the ready nodes of each thread."""

    def __init__(self, streams: Streams, n: int, nodes: _Nodes, root: Any) -> None:
        self.streams = streams
        self.n = n
        self.made = nodes.made
        self.missing = _uses(root)
        # The current streams of the thread that calls backward.
        self.callers = [streams.new(torch.device("cpu", j)) for j in range(n)]
        # Nodes that come after the pipeline in forward, such as the loss, run on the last device.
        self.last = (streams.of(torch.device("cpu", n - 1)), [0])
        self.grads: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        self.grads[root][0] = torch.ones(())
        self.events: dict[Any, list[Any]] = defaultdict(list)
        self.ready: dict[int, list[Any]] = {n - 1: [root]}

    def run(self, turns: Callable[[list[int]], int]) -> None:
        while threads := [thread for thread, nodes in self.ready.items() if nodes]:
            nodes = self.ready[turns(threads)]
            node = max(nodes, key=lambda node: node._sequence_nr())
            nodes.remove(node)
            grads = self.apply(node)
            for (following, position), grad in zip(node.next_functions, grads, strict=True):
                if following is not None and not following.name().endswith("AccumulateGrad"):
                    self.hand_on(node, following, position, grad)

    def stream_of(self, node: Any) -> Any:
        stream, _ = self.made.get(node, self.last)
        return stream

    def apply(self, node: Any) -> tuple[Tensor | None, ...]:
        """Run an autograd node on its stream, and return the gradients that the node computes."""
        stream = self.stream_of(node)
        for event in self.events[node]:
            stream.wait_event(event)
        given = [self.grads[node].get(k) for k in range(len(node._input_metadata))]
        current = self.callers if stream is None else [stream]
        with self.streams.using(*current):
            found = getattr(node, "apply", node)(*given)
        grads = found if isinstance(found, tuple) else (found,)
        if node in self.made:
            _, tensors = self.made[node]
            grads = tuple(grads[k] for k in tensors)
        return grads

    def hand_on(self, node: Any, following: Any, position: int, grad: Tensor | None) -> None:
        """Pass a gradient to the next node, which becomes ready when its last gradient comes."""
        stream = self.stream_of(node)
        home = self.stream_of(following)
        if grad is not None:
            self.grads[following][position] = grad
            if home is not stream:
                self.events[following].append(stream.record_event())
        self.missing[following] -= 1
        if self.missing[following] == 0:
            thread = self.n if home is None else home.device.index
            self.ready.setdefault(thread, []).append(following)
