"""What was tried to make the pipeline fast: each idea against what it replaced, measured side by side.

    python -m benchmarks.decisions

Steps with the idea and without it take turns in one process: with tasks that do next to nothing (`Linear(8, 8)`, in
microseconds per task), or of a small AmoebaNet-D (in milliseconds per step). A ratio is the median over turns of the
time with the idea by the time without; below 1 it is a gain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.harness import Found, by_case, command, keep, render, start, turns
from benchmarks.pipelines import on_cpu
from reproduce.models import amoebanetd
from reproduce.records.record import Record, Result
from torchgpipe.checkpoint import Mode
from torchgpipe.relay import Queues, Relay
from torchgpipe.task_graph import TaskGraph


@dataclass(frozen=True)
class Way:
    """One way to run a step: an engine (`pipelines`), on tasks that are short or long, with a part replaced or not."""

    engine: str
    checkpoint: Mode
    long: bool = False
    m: int = 8
    undone: Callable[[], AbstractContextManager[Any]] = nullcontext

    def build(self) -> Callable[[], float]:
        """Return what runs a step of two partitions, and returns seconds per task (short) or per step (long)."""
        torch.manual_seed(0)
        layers = amoebanetd(3, 32, num_classes=10) if self.long else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        x = torch.randn(4 * self.m, 3, 224, 224) if self.long else torch.randn(self.m, 8)
        first = len(layers) // 3 if self.long else 1  # of AmoebaNet-D, the first layers have the large images
        balance = [first, len(layers) - first]
        model: Any = on_cpu(layers, balance, self.engine, chunks=self.m, checkpoint=self.checkpoint)

        def step() -> float:
            with self.undone():
                began = time.perf_counter()
                model(x).sum().backward()
                return (time.perf_counter() - began) / (1 if self.long else 2 * self.m)

        return step


@dataclass(frozen=True)
class Idea:
    """Something that was tried: what it does, what was expected of it, and what became of it."""

    what: str
    predicted: str
    outcome: str
    with_it: Way | None = None
    without: Way | None = None


def _recomputes_with_the_gradient() -> AbstractContextManager[Any]:
    """Replace recomputation ahead of the gradient by one that is a part of backward."""
    recompute, backward = TaskGraph.recompute, TaskGraph.backward

    def late(graph: TaskGraph, grads: Any, *, keep: bool = False) -> Any:
        if any(grad is not None for grad in grads):
            recompute(graph, keep=keep)
        return backward(graph, grads, keep=keep)

    return patch.multiple(TaskGraph, recompute=lambda graph, *, keep=False: None, backward=late)


def _with_autograds_checks() -> AbstractContextManager[Any]:
    """Replace the direct call of the autograd engine by `torch.autograd.backward`."""

    def run(roots: Sequence[Any], grads: Sequence[Tensor], *, keep_graph: bool) -> None:
        torch.autograd.backward(tuple(roots), tuple(grads), retain_graph=keep_graph)

    return patch("torchgpipe.task_graph.run_backward", run)


@contextmanager
def _recomputes_at_once() -> Iterator[None]:
    """Replace recomputations that wait for a use: another item of lead, in forward too, and nothing is announced."""

    def nothing(link: Queues) -> None:
        pass

    with patch.object(Relay, "LEAD", 2), patch.multiple(Queues, announce=nothing, expect=nothing):
        yield


SHORT = Way("graph", "never")
SHORT_ALWAYS = Way("graph", "always")
LONG = Way("workers", "never", long=True, m=4)
LONG_ALWAYS = Way("workers", "always", long=True, m=4)

IDEAS = [
    Idea("a thread per partition, forward and backward",
         "up to 2·m/(m + 1) on two cores: 1.6 times as fast", "kept for several CPU partitions",
         LONG, replace(LONG, engine="graph")),
    Idea("a thread per partition for short tasks, too",
         "each hand-over wakes a thread, and the threads share Python's lock: slower",
         "kept: no engine is chosen by what steps take; engine='graph' is there for such tasks",
         replace(SHORT, engine="workers"), SHORT),
    Idea("in one place, with nothing to recompute, the layers' own graph is the pipeline's",
         "no node, no tie and no call of the autograd engine for each task",
         "kept; across devices tasks are nodes with ties, as autograd has a thread for each",
         SHORT, replace(SHORT, engine="across")),
    Idea("recomputation before the gradient arrives",
         "a recomputation less on the critical path for every partition but the last", "kept",
         LONG_ALWAYS, replace(LONG_ALWAYS, undone=_recomputes_with_the_gradient)),
    Idea("a partition is at most one task ahead of the next",
         "no gain in time; fewer gradients and skips alive at once", "kept, for memory",
         LONG, replace(LONG, undone=lambda: patch.object(Relay, "LEAD", 1000))),
    Idea("a recomputation waits until its gradient is being made, and the one before it was taken",
         "no loss of time; fewer working sets alive at once", "kept, for memory",
         LONG_ALWAYS, replace(LONG_ALWAYS, undone=_recomputes_at_once)),
    Idea("the autograd engine called without torch.autograd.backward's checks",
         "some Python work less for each checkpointed task", "kept",
         SHORT_ALWAYS, replace(SHORT_ALWAYS, undone=_with_autograds_checks)),
    Idea("the calling thread in place of workers where the first steps' tasks were short",
         "the faster of both engines for every model", "dropped: steps differed, by how busy the machine was"),
    Idea("threads that take turns by a baton, so that Python's lock is not fought over",
         "hand-overs without contention", "dropped: no faster than the lock's own turns, slower than no threads"),
    Idea("in one thread, one node for a whole mini-batch, with a program per partition",
         "fewer nodes in the caller's graph", "dropped: every task then needs a call of the autograd engine"),
    Idea("saved-tensor hooks in place of a node per checkpointed task",
         "no call of the autograd engine in backward", "dropped: batch norm saves other tensors in its second pass"),
    Idea("one micro-batch through all partitions before the next, in one thread",
         "gradients are used as soon as they are there", "dropped: more alive at the peak than by clock cycles"),
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every idea and print a table."""
    options = command("decisions", __doc__, rounds=20, steps=10).parse_args(arguments)
    record = start(options, "decisions", "ideas, and what they replaced", {"time": "s"}, devices=2)
    tried = [idea for idea in IDEAS if idea.with_it is not None]
    keep(record, options.json, measure(tried, options.rounds, options.steps), len(tried), table)


def measure(tried: Sequence[Idea], rounds: int, steps: int) -> Found:
    """Yield the results of one idea after another."""
    for idea in tried:
        assert idea.with_it is not None and idea.without is not None
        ways = {"with": idea.with_it.build(), "without": idea.without.build()}
        turn = {way: partial(_turn, step, 1 if idea.with_it.long else steps) for way, step in ways.items()}
        *_, samples = turns(turn, rounds, warm_up=2)
        yield [Result(idea.what, way, "measured", samples={"time": found}) for way, found in samples.items()]


def _turn(step: Callable[[], float], steps: int) -> float:
    return statistics.median(step() for _ in range(steps))


def table(record: Record, style: str = "simple") -> str:
    """Render each idea with what was predicted, measured, and decided."""
    cases = by_case(record)
    rows = []
    for idea in IDEAS:
        found = cases.get(idea.what)
        if found is None or idea.with_it is None:
            rows.append([idea.what, idea.predicted, "", "", idea.outcome])
            continue
        times = [found[way].samples["time"] for way in ("with", "without")]
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        unit, name = (1e3, "ms a step") if idea.with_it.long else (1e6, "µs a task")
        both = " / ".join(f"{statistics.median(each) * unit:.0f}" for each in times)
        rows.append([idea.what, idea.predicted, f"{both} {name}", f"{ratio:.2f}", idea.outcome])
    return render(["tried", "predicted", "with / without it", "ratio", "outcome"], rows, style)


if __name__ == "__main__":
    main()
