"""Counts of a step: growth that is planted into the pipeline is seen, and reported in a line.

That all is counted, and each thing once, `test_counts` shows: the committed counts are as they were. Here is what these
have none of, and what only happens to a pipeline that came to do more.
"""

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
from benchmarks.counted_step import Configuration, count
from benchmarks.counts import differences
from torchgpipe.microbatch import gather
from torchgpipe.pool import Workers
from torchgpipe.task_graph import TaskGraph

WORKERS = Configuration("linear", 2, 4, "always", "workers")
TASKS = 8
MINI_BATCHES = 2  # threads count in all of them, the rest in the last one

Plant = Callable[[pytest.MonkeyPatch], None]
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_is_kept_of_a_test() -> Iterator[None]:
    yield
    for kept in KEPT:
        if isinstance(kept, Workers):
            kept._end()
    KEPT.clear()


def in_each_backward(program: Callable[[Tensor], object]) -> Plant:
    """Run a program before the backward of each task, in the task's thread."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        backward = TaskGraph.backward

        def changed(self: TaskGraph, grads: Any, *, keep: bool = False) -> Any:
            program(grads[0])
            return backward(self, grads, keep=keep)

        monkeypatch.setattr(TaskGraph, "backward", changed)

    return plant


def in_each_gather(program: Callable[[list[Any]], object]) -> Plant:
    """Run a program on the micro-batches' outputs, once in each mini-batch."""

    def changed(outputs: list[Any]) -> Any:
        program(outputs)
        return gather(outputs)

    return lambda monkeypatch: monkeypatch.setattr(torchgpipe.gpipe, "gather", changed)


def one_more_thread(outputs: list[Any]) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def one_more_queue(grad: Tensor) -> None:
    queue: Any = torchgpipe.relay.SimpleQueue()  # type: ignore[attr-defined]
    queue.put(grad)
    queue.get()


def one_more_lock(grad: Tensor) -> None:
    with torchgpipe.randomness.DEFAULT_GENERATOR_LOCK:
        pass


def threads_that_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Workers) -> None:
        monkeypatch.setattr(benchmarks.tally, "PATIENCE", 0.5)  # from now on: all steps are done, and settled in peace
        KEPT.append(self)

    monkeypatch.setattr(Workers, "close", keep)


# A plant, and by how much each count is to grow.
PLANTS: dict[str, tuple[Plant, dict[str, int]]] = {
    "operators": (in_each_backward(lambda grad: grad.detach()), {"operators": TASKS}),
    "tensors kept": (in_each_gather(KEPT.append), {"kept": 4, "kept_bytes": 4 * 64}),
    "threads": (in_each_gather(one_more_thread), {"threads": MINI_BATCHES, "waits": 2}),
    "a thread left": (threads_that_are_not_ended, {"threads_left": 1}),
    "hand-overs": (in_each_backward(one_more_queue), {"waits": TASKS}),
    "locks": (in_each_backward(one_more_lock), {"waits": TASKS}),
    "synchronizations": (in_each_backward(lambda grad: torch.cpu.synchronize()), {"reads": TASKS}),
    "a read": (in_each_gather(lambda outputs: outputs[0][0, 0].item()), {"operators": 3, "reads": 1}),
}


@pytest.fixture(scope="module")
def unchanged() -> dict[str, int | None]:
    return count(WORKERS).counts._asdict()


@pytest.mark.parametrize(("plant", "growth"), PLANTS.values(), ids=PLANTS)
def test_growth_is_reported(
    plant: Plant, growth: dict[str, int], unchanged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    lines = differences({str(WORKERS): unchanged}, {WORKERS: count(WORKERS)})
    expected = [
        f"{WORKERS}: {name.replace('_', ' ')} grew from {unchanged[name]} to {unchanged[name] + by}"
        for name, by in growth.items()
    ]
    assert [re.match(".*grew from [0-9]+ to [0-9]+", line)[0] for line in lines] == expected  # type: ignore[index]
