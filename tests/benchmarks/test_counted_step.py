"""Counts of a step: each kind of growth that is planted into the pipeline is seen, and reported in a line."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks.tally
import torchgpipe.gpipe
import torchgpipe.randomness
import torchgpipe.relay
from benchmarks.counted_step import CONFIGURATIONS, Configuration, Counted, count
from benchmarks.counts import differences
from torchgpipe.microbatch import gather
from torchgpipe.relay import Workers
from torchgpipe.task_graph import TaskGraph

WORKERS = Configuration("linear", 2, 4, "always", "workers")
GRAPH = Configuration("linear", 2, 4, "always", "graph")
TASKS = 8
MINI_BATCHES = 2  # threads count in all of them, the rest in the last one

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def unchanged() -> dict[Configuration, Counted]:
    return {configuration: count(configuration) for configuration in CONFIGURATIONS}


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_counts_are_of_what_ran(configuration: Configuration, unchanged: dict[Configuration, Counted]) -> None:
    counts = unchanged[configuration].counts
    overlap = configuration.engine == "workers" and configuration.m > 1
    assert counts.threads == (configuration.n - 1 if overlap else 0)
    assert counts.threads_left == 0
    assert (counts.alive is None) == (counts.alive_bytes is None) == overlap
    if counts.alive is not None and counts.alive_bytes is not None:
        assert counts.alive >= counts.kept > 0 and counts.alive_bytes >= counts.kept_bytes > 0
    if configuration.engine != "workers":
        assert counts.reads == 0


def in_each_backward(program: Callable[[Tensor], object]) -> Plant:
    """Run a program before the backward of each task, in the task's thread; let go of its result afterwards."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        backward = TaskGraph.backward

        def changed(self: TaskGraph, grads: Any, *, keep: bool = False) -> Any:
            held = program(grads[0])
            input_grads = backward(self, grads, keep=keep)
            del held
            return input_grads

        monkeypatch.setattr(TaskGraph, "backward", changed)

    return plant


def in_each_gather(program: Callable[[list[Any]], object]) -> Plant:
    """Run a program on the micro-batches' outputs, once in each mini-batch."""

    def changed(outputs: list[Any]) -> Any:
        program(outputs)
        return gather(outputs)

    return lambda monkeypatch: monkeypatch.setattr(torchgpipe.gpipe, "gather", changed)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def one_more_node(outputs: list[Any]) -> None:
    outputs[0] = Same.apply(outputs[0])


def one_more_thread(outputs: list[Any]) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def one_more_queue(grad: Tensor) -> None:
    queue = torchgpipe.relay.SimpleQueue()
    queue.put(grad)
    queue.get()


def one_more_lock(grad: Tensor) -> None:
    with torchgpipe.randomness.DEFAULT_GENERATOR_LOCK:
        pass


KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_is_kept_of_a_test() -> Iterator[None]:
    yield
    for kept in KEPT:
        if isinstance(kept, Workers):
            kept._end()
    KEPT.clear()


def threads_that_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Workers) -> None:
        monkeypatch.setattr(benchmarks.tally, "PATIENCE", 0.5)  # from now on: all steps are done, and settled in peace
        KEPT.append(self)

    monkeypatch.setattr(Workers, "close", keep)


# A plant, and by how much each count is to grow.
PLANTS: dict[str, tuple[Configuration, Plant, dict[str, int]]] = {
    "operators": (WORKERS, in_each_backward(lambda grad: grad.detach()), {"operators": TASKS}),
    "a node": (WORKERS, in_each_gather(one_more_node), {"operators": 1, "nodes": 1}),
    "tensors kept": (WORKERS, in_each_gather(KEPT.append), {"kept": 4, "kept_bytes": 4 * 64}),
    "a tensor at the peak": (
        GRAPH, in_each_backward(lambda grad: grad + 1), {"operators": TASKS, "alive": 1, "alive_bytes": 64},
    ),
    "threads": (WORKERS, in_each_gather(one_more_thread), {"threads": MINI_BATCHES, "waits": 2}),
    "a thread left": (WORKERS, threads_that_are_not_ended, {"threads_left": 1}),
    "hand-overs": (WORKERS, in_each_backward(one_more_queue), {"waits": TASKS}),
    "locks": (WORKERS, in_each_backward(one_more_lock), {"waits": TASKS}),
    "synchronizations": (WORKERS, in_each_backward(lambda grad: torch.cpu.synchronize()), {"reads": TASKS}),
    "a read": (WORKERS, in_each_gather(lambda outputs: outputs[0][0, 0].item()), {"operators": 3, "reads": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("configuration", "plant", "growth"), PLANTS.values(), ids=PLANTS)
def test_growth_is_reported(
    configuration: Configuration,
    plant: Plant,
    growth: dict[str, int],
    unchanged: dict[Configuration, Counted],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = unchanged[configuration].counts._asdict()
    plant(monkeypatch)
    lines = differences({str(configuration): before}, {configuration: count(configuration)})
    expected = [
        f"{configuration}: {name.replace('_', ' ')} grew from {before[name]} to {before[name] + by}"
        for name, by in growth.items()
    ]
    assert [line[: re.search("grew from [0-9]+ to [0-9]+", line).end()] for line in lines] == expected
