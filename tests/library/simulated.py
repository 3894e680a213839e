"""Simulated devices: streams with clocks, and autograd's threads. NCCL on them is in distributed/threads.py.

`cpu:0`, `cpu:1`, … are devices. A stream logs its calls and executes work in the order of submission. Its clock is the
time at which all submitted work has ended; the host takes no time. A copy occupies the current streams of both its
devices. tests/test_cuda.py runs real streams.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.distributed.wires.cuda
import torchgpipe.engine.graph
import torchgpipe.tensors.copy
from torchgpipe import is_recomputing

from .layers import same


def working(x: Tensor, work: Callable[[str], object], *parameters: Tensor) -> Tensor:
    """Return `x`; call `work` with "forward", "recompute" or "backward" when it runs. Parameters have the size of x."""
    y: Tensor = _Working.apply(x, work, *parameters)
    return y


class _Working(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[str], object], *parameters: Tensor) -> Tensor:
        ctx.work, ctx.taken = work, len(parameters)
        work("recompute" if is_recomputing() else "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.work("backward")
        return grads[0], None, *grads * ctx.taken


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
    seconds = {"forward": forward, "backward": backward}
    return working(x, lambda kind: CLOCK.spend(seconds[kind], f"{name} {kind}"))


class Spend(nn.Module):
    """Spend seconds in forward and in backward. `before` and `after` are applied to input and output."""

    def __init__(
        self, forward: float, backward: float = 0.0, name: str = "", *, before: Any = same, after: Any = same
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seconds, self.name, self.before, self.after = (forward, backward), name, before, after

    def forward(self, x: Any) -> Any:
        return self.after(spend(self.before(x) * self.weight, *self.seconds, self.name))


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
    """All streams by device, and the seconds of a copy by pair of device indices, the lower one first."""

    patch: pytest.MonkeyPatch
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    compute: dict[torch.device, Stream] = field(default_factory=dict)
    others: list[Stream] = field(default_factory=list)
    thread: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        """Patch the library's streams with simulated ones. Only copies of tensors are real."""
        to, modules = Tensor.to, (torchgpipe.tensors.copy, torchgpipe.engine.graph, torchgpipe.distributed.wires.cuda)

        def copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.current and args and isinstance(args[0], torch.device):
                self.copy(args[0])
            return to(x, *args, **kwargs)

        for name, ours in (("new_stream", self.new), ("current_stream", self.of), ("using", self.using)):
            for module in modules:
                self.patch.setattr(module, name, ours, raising=False)
        self.patch.setattr(torch.cuda, "Event", lambda **_: None)
        self.patch.setattr(Tensor, "to", copied)
        self.patch.setattr(Tensor, "record_stream", lambda x, s: self.log.append(f"memory is used by {s.name}"))

    @property
    def current(self) -> list[Stream]:
        """The current streams of this thread, the innermost last."""
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

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        all_of_them = [*self.compute.values(), *self.others]
        end = max(stream.clock for stream in all_of_them)
        for stream in all_of_them:
            stream.clock = end


def backward_by_threads(streams: Streams, n: int, turns: Callable[[list[int]], int]) -> Callable[[Tensor], None]:
    """Return a backward function for `n` partitions that works as PyTorch documents it for CUDA.

    On CUDA autograd has a thread per device, on the CPU only one. A thread may submit work ahead of another: `turns`
    chooses the next thread among those with ready nodes. A node runs in the thread of its device; a CPU node, in
    the thread that called backward (here number `n`). A thread runs the ready node with the highest sequence number. A
    node runs on the stream that was current in its forward. That stream first waits for the streams of the nodes that
    its gradients come from, for all work that they had when these nodes had run.
    """
    made: dict[Any, tuple[Any, list[int]]] = {}  # node -> its stream, positions of its tensor arguments
    at = [0]
    task = torchgpipe.engine.graph._MiniBatch.task

    def noted_task(self: Any, i: int, j: int) -> None:
        at[0] = j
        task(self, i, j)

    def noted_apply(cls: Any, *args: Any) -> Any:
        result = super(torch.autograd.Function, cls).apply(*args)
        device = args[1] if cls.__name__ == "_Gate" else torch.device("cpu", at[0])
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
