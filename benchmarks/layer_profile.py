"""Profile a model's layers on this machine's CPU, and replay a setup with such profiles.

Two partitions at work share the machine's memory bandwidth, so layers are timed twice: while the other cores are idle,
and while one of them does the same work. How much of a task overlaps with another partition's decides between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.predict import Setup
from torchgpipe.replay import Costs, Timeline, replay
from torchgpipe.schedule import overlaps
from torchgpipe.skip.scope import skip_scope

__all__ = ["KINDS", "Profile", "busy", "profile", "replayed"]

KINDS = ("forward", "graph", "backward")
SETTLED = 10
"""Replays after which tasks' times and overlaps hardly change."""


@dataclass(frozen=True)
class Profile:
    """Seconds of every layer for one micro-batch: forward, with a graph and without, and backward."""

    forward: list[float]
    graph: list[float]
    backward: list[float]


def profile(model: nn.Sequential, x: Tensor) -> Profile:
    """Time the layers in one forward without a graph, and in one forward and backward.

    The graph of all layers is kept, as in a step: memory that is touched for the first time takes longer than memory
    that was just freed. A layer's backward lasts from its output's gradient to that of the layer before.
    """
    with torch.no_grad(), skip_scope({}):
        forward, _ = _forward(model, x)
    arrived = [0.0] * len(model)

    def notice(i: int, _: Tensor) -> None:
        arrived[i] = perf_counter()

    with skip_scope({}):
        graph, output = _forward(model, x, notice)
    gradient = torch.ones_like(output)
    start = perf_counter()
    output.backward(gradient)
    end = perf_counter()
    # Layers that do next to nothing in backward may get their gradients out of order.
    arrived = [*accumulate(reversed([*arrived[:-1], start]), max)][::-1]
    backward = [a - b for a, b in pairwise([end, *arrived])]
    return Profile(forward, graph, backward)


def _forward(
    model: nn.Sequential, x: Tensor, notice: Callable[[int, Tensor], None] | None = None
) -> tuple[list[float], Tensor]:
    """Run the layers; return their seconds and the output. `notice` is told when a layer's output has its gradient."""
    seconds, value = [], x
    for i, layer in enumerate(model):
        start = perf_counter()
        value = layer(value)
        seconds.append(perf_counter() - start)
        if notice is not None:
            for y in (value,) if isinstance(value, Tensor) else value:
                y.register_hook(partial(notice, i))
    return seconds, value


@contextmanager
def busy(model: nn.Sequential, x: Tensor) -> Iterator[None]:
    """Keep another core at work on the same."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            profile(model, x)

    other = threading.Thread(target=work)
    other.start()
    try:
        yield
    finally:
        over.set()
        other.join()


def replayed(alone: Profile, shared: Profile, setup: Setup) -> Timeline:
    """Replay a setup with profiles of micro-batches of its size: `shared` counts while another partition works.

    How long tasks take and when they overlap depend on each other; a few replays settle both.
    """
    m, recomputed = len(setup.sizes), checkpointed(setup.checkpoint, len(setup.sizes))
    ahead = overlaps(m, len(setup.cuts))  # else one thread does all

    def table(seconds: Sequence[float]) -> list[list[float]]:
        return [[sum(seconds[a:b]) for a, b in setup.cuts] for _ in range(m)]

    def costs(found: Profile) -> Costs:
        plain, graph, none = table(found.forward), table(found.graph), table([0.0] * len(found.forward))
        forward = plain[:recomputed] + graph[recomputed:]
        return Costs(forward, table(found.backward), table(found.graph)[:recomputed] + none[recomputed:], ahead=ahead)

    quick, slow = costs(alone), costs(shared)
    now = costs(alone)
    timeline = replay(now)
    for _ in range(SETTLED):
        for event in timeline.events:
            i, j = event.micro_batch, event.partition
            share = _overlap(timeline, j, event.start, event.end)
            own, both = getattr(quick, event.kind)[i][j], getattr(slow, event.kind)[i][j]
            getattr(now, event.kind)[i][j] = own + share * (both - own)
        timeline = replay(now)
    return timeline


def _overlap(timeline: Timeline, partition: int, start: float, end: float) -> float:
    """Return the share of the time from `start` to `end` in which another partition works."""
    if end <= start:
        return 0.0
    others = (e for e in timeline.events if e.partition != partition)
    return min(1.0, sum(max(0.0, min(end, e.end) - max(start, e.start)) for e in others) / (end - start))
