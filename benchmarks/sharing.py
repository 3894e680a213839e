"""Replay a setup on this machine's CPU, where partitions at work slow each other down.

They share the machine's memory bandwidth, so layers are timed twice: while the other cores are idle, and while one of
them does the same work. How much of a task overlaps with another partition's decides between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.predict import Setup
from torchgpipe.plan.replay import Costs, Timeline, replay
from torchgpipe.plan.timing import Seconds, time_step
from torchgpipe.schedule import overlaps

CPU = torch.device("cpu")
SETTLED = 10
"""Replays after which tasks' times and overlaps hardly change."""


@contextmanager
def busy(model: nn.Sequential, x: Tensor) -> Iterator[None]:
    """Keep another core at work on the same."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            time_step(model, x, CPU)

    other = threading.Thread(target=work)
    other.start()
    try:
        yield
    finally:
        over.set()
        other.join()


def replayed(alone: Seconds, shared: Seconds, setup: Setup) -> Timeline:
    """Replay a setup with profiles of micro-batches of its size: `shared` counts while another partition works.

    How long tasks take and when they overlap depend on each other; a few replays settle both.
    """
    m, recomputed = len(setup.sizes), checkpointed(setup.checkpoint, len(setup.sizes))
    ahead = overlaps(m, len(setup.cuts))  # else one thread does all

    def table(seconds: Sequence[float]) -> list[list[float]]:
        return [[sum(seconds[a:b]) for a, b in setup.cuts] for _ in range(m)]

    def costs(found: Seconds) -> Costs:
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
