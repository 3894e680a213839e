"""The graph engine on simulated streams: each task starts when the replay says, so that no stream waits in vain.

The engine, its waits and its copies are real; the streams are stand-ins that keep a clock (conftest.py), and a layer
keeps its partition's compute stream busy for as long as its task is said to take. So this shows what the streams are
given to do, and in which order, by a host that needs no time.

On the CPU autograd has one thread, on CUDA one for each device, and one may be ahead of another with what it gives to
the streams. That is played by `backward_by_threads`, after what PyTorch documents. What the real engine does with real
streams, how long a host takes to feed them, and whether copies get in each other's way, only GPUs can tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import torchgpipe.graph
from torchgpipe import GPipe, is_recomputing
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.plan.replay import Costs, Event, replay
from torchgpipe.skip import Namespace

from .layers import Pop, Stash

MODES: tuple[Mode, ...] = ("never", "except_last", "always")

# Seconds of a forward, by micro-batch and partition; whole ones, so that sums are exact.
TIMES: dict[str, Callable[[int, int], int]] = {
    "equal": lambda i, j: 1,
    "first slow": lambda i, j: 3 if j == 0 else 1,
    "last slow": lambda i, j: 1 + j,
    "middle quick": lambda i, j: 1 if j in (1, 2) else 3,
    "any": lambda i, j: Random(10 * i + j).randint(1, 5),
}

# Seconds of each copy to the next partition, and of skips. No copy takes longer than a task, or it would queue.
COPIES: dict[str, tuple[float, dict[tuple[int, int], float]]] = {
    "no time": (0.0, {}),
    "some time": (0.25, {}),
    "as long as a task": (1.0, {}),
    "a skip, no time": (0.0, {(0, 2): 0.0}),
    "a skip": (0.25, {(0, 2): 0.5}),
    "a skip that is late": (0.0, {(0, 3): 1.0}),
    "many skips": (0.25, {(0, 2): 0.5, (0, 3): 0.75, (1, 3): 1.0}),
}


def cost(n: int, m: int, mode: Mode, times: str, copies: str) -> Costs:
    """Let backward take twice as long as forward, and recomputation as long."""
    forward = [[float(TIMES[times](i, j)) for j in range(n)] for i in range(m)]
    recomputed = checkpointed(mode, m)
    copy, skips = COPIES[copies]
    return Costs(
        forward=forward,
        backward=[[2 * seconds for seconds in row] for row in forward],
        recompute=[row if i < recomputed else [0.0] * n for i, row in enumerate(forward)],
        copy=[copy] * (n - 1),
        skips=skips,
    )


CASES = [
    pytest.param(n, m, times, copies, id=f"n{n}m{m}, {times}, {copies}")
    for n in (1, 2, 4)
    for m in (1, 2, 4, 8)
    for times in TIMES
    for copies, (_, skips) in COPIES.items()
    if n == 4 or not (skips or (n == 1 and copies != "no time"))
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m", "times", "copies"), CASES)
def test_every_task_starts_when_the_replay_says(
    n: int, m: int, times: str, copies: str, mode: Mode, streams: Any
) -> None:
    costs = cost(n, m, mode, times, copies)
    assert sorted(step(costs, mode, streams)) == sorted(replay(costs).events)


# Which thread is next to run a node, of those that can.
TURNS: dict[str, Callable[[list[int]], int]] = {
    "first device ahead": min,
    "last device ahead": max,
    **{f"chance {seed}": Random(seed).choice for seed in range(3)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("copies", ["no time", "some time", "a skip that is late", "many skips"])
def test_no_thread_waits_for_what_another_is_ahead_with(
    copies: str, times: str, turns: str, mode: Mode, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = cost(4, 5, mode, times, copies)
    backward = backward_by_threads(streams, 4, TURNS[turns], monkeypatch)
    found = step(costs, mode, streams, backward=backward)
    assert sorted(found) == sorted(replay(costs).events)


def test_without_dependency_threads_may_go_backward_in_another_order(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = cost(4, 5, "always", "any", "some time")
    backward = backward_by_threads(streams, 4, max, monkeypatch)
    found = step(costs, "always", streams, backward=backward, dependency=False)
    assert sorted(found) != sorted(replay(costs).events)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_copies_that_take_longer_than_tasks_go_one_after_another(seconds: float, m: int, streams: Any) -> None:
    """The replay's copies do not queue; the streams' do, in either direction, as they have one link between them."""
    once = [[1.0, 1.0]] * m
    costs = Costs(forward=once, backward=once, recompute=[[0.0, 0.0]] * m, copy=[seconds])
    events = step(costs, "never", streams)
    assert max(event.end for event in events) == 2 * (1 + m * seconds + 1)
    assert replay(costs).seconds == 2 * (m + seconds + 1)


def step(
    costs: Costs, mode: Mode, streams: Any, *, backward: Any = Tensor.backward, dependency: bool = True
) -> list[Event]:
    """Run a pipeline with these costs through one step; return when its tasks ran."""
    m, n = len(costs.forward), len(costs.forward[0])
    events: list[Event] = []

    def work(kind: Literal["forward", "recompute", "backward"], i: int, j: int) -> None:
        start, end = streams.of(torch.device("cpu", j)).run(getattr(costs, kind)[i][j])
        events.append(Event(kind, i, j, start, end))

    partitions: list[list[nn.Module]] = [[Task(j, work)] for j in range(n)]
    for source, target in costs.skips:
        namespace = Namespace()
        partitions[source].append(Stash(lambda x: x * 0).isolate(namespace))  # type: ignore[operator]
        partitions[target].insert(0, Pop().isolate(namespace))  # type: ignore[operator]
    assert not isinstance(costs.copy, float)
    streams.seconds = {**{(j, j + 1): seconds for j, seconds in enumerate(costs.copy)}, **costs.skips}

    model = GPipe(
        nn.Sequential(*(layer for layers in partitions for layer in layers)),
        [len(layers) for layers in partitions],
        devices=[torch.device("cpu", j) for j in range(n)],
        chunks=m,
        checkpoint=mode,
        engine="graph",
        dependency=dependency,
    )
    y = model(torch.arange(m).float())
    # As if the loss were printed: the replay recomputes nothing before it is there, and a quick host would.
    streams.synchronize()
    backward(y.sum())
    assert y.tolist() == list(range(m))
    return events


Run = Callable[[Literal["forward", "recompute", "backward"], int, int], None]


class Task(nn.Module):
    """Do the work of partition `j`, and change nothing. The data is the number of the micro-batch."""

    def __init__(self, j: int, work: Run) -> None:
        super().__init__()
        self.j, self.work = j, work
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Task.apply(x, self.scale, self)
        return y


class _Task(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, task: Task) -> Tensor:
        ctx.task, ctx.i = task, int(x)
        task.work("recompute" if is_recomputing() else "forward", ctx.i, task.j)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.task.work("backward", ctx.i, ctx.task.j)
        return grads[0], grads[0], None


def backward_by_threads(
    streams: Any, n: int, turns: Callable[[list[int]], int], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor], None]:
    """Return a backward as on CUDA, for a pipeline of `n` partitions.

    A node belongs to the thread of its device; one of the CPU (here `n`), to the thread that called backward. A thread
    takes the latest node that has all its gradients. A node has the stream that was current when it was made, which
    waits for what the streams of the nodes before it had been given by the time when these had run.
    """
    made: dict[Any, tuple[Any, list[int]]] = {}  # a node's stream, and which of its arguments are tensors
    at = [0]
    task = torchgpipe.graph._MiniBatch.task

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

    monkeypatch.setattr(torchgpipe.graph._MiniBatch, "task", noted_task)
    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(noted_apply))

    @torch.no_grad()
    def backward(loss: Tensor) -> None:
        missing, unseen = defaultdict[Any, int](int), [loss.grad_fn]
        while unseen:
            for node, _ in unseen.pop().next_functions:  # type: ignore[union-attr]
                if node not in missing:
                    unseen.extend([node] if node is not None else [])
                missing[node] += 1

        # Those that are current where backward is called.
        callers = [streams.new(torch.device("cpu", j)) for j in range(n)]
        # What comes after the pipeline is on the last device.
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
