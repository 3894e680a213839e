"""The observer sees every task once, by its right name, in the thread that runs it and in an order that can be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Task

from ..plain import piped
from .parts.layers import linear, only_a_skip


class Log:
    """Write down when tasks start and end."""

    def __init__(self) -> None:
        self.started: list[Task] = []
        self.ended: list[Task] = []
        self.running = threading.local()

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        self.started.append(task)
        self.running.task = task
        try:
            yield
        finally:
            self.running.task = None
            self.ended.append(task)


def linears() -> nn.Sequential:
    return nn.Sequential(*(linear() for _ in range(6)))


def observed(
    module: nn.Sequential, balance: list[int], chunks: int, way: dict[str, Any]
) -> tuple[Any, Log, Sequence[int]]:
    """Return a pipeline, what it tells its observer, and the partitions of which that may hear: a rank's own."""
    model = piped(module, balance, chunks, **way)
    log = model.observer = Log()
    return model, log, [model.rank] if way["engine"] == "ranks" else range(len(balance))


def tasks(kind: Any, m: int, partitions: Sequence[int]) -> set[Task]:
    return {Task(kind, i, j) for i in range(m) for j in partitions}


def expected_tasks(m: int, partitions: Sequence[int], checkpoint: Any) -> set[Task]:
    kinds = {"forward": m, "recompute": checkpointed(checkpoint, m), "backward": m}
    return {task for kind, count in kinds.items() for task in tasks(kind, count, partitions)}


@pytest.mark.parametrize("batch, chunks, m", [(8, 1, 1), (8, 4, 4), (13, 8, 7)])
@pytest.mark.parametrize(
    "build, balance",
    [(linears, [6]), (linears, [2, 4]), (linears, [1, 2, 3]), (linears, [2, 1, 1, 2]), (only_a_skip, [2, 1])],
    ids=["n1", "n2", "n3", "n4", "only a skip"],
)
def test_every_task_once_and_in_order(
    build: Any, balance: list[int], batch: int, chunks: int, m: int, way: dict[str, Any]
) -> None:
    model, log, partitions = observed(build(), balance, chunks, way)
    for _ in range(2):
        log.started.clear()
        log.ended.clear()
        y = model(torch.randn(batch, 4))
        assert set(log.started) == set(log.ended) == tasks("forward", m, partitions)
        y.sum().backward()
        assert max(Counter(log.started).values()) == 1
        assert set(log.started) == set(log.ended) == expected_tasks(m, partitions, way["checkpoint"])

    def before(earlier: Task, later: Task) -> bool:
        return log.ended.index(earlier) < log.ended.index(later)

    for i in range(m):
        for j in partitions:
            if j - 1 in partitions:
                assert before(Task("forward", i, j - 1), Task("forward", i, j))
                assert before(Task("backward", i, j), Task("backward", i, j - 1))
            if i:
                assert before(Task("forward", i - 1, j), Task("forward", i, j))
                assert before(Task("backward", i, j), Task("backward", i - 1, j))
            if Task("recompute", i, j) in log.started:
                assert before(Task("recompute", i, j), Task("backward", i, j))


def test_layers_run_within_their_task(way: dict[str, Any]) -> None:
    seen: list[tuple[Task, bool, bool]] = []

    class Witness(nn.Module):
        def __init__(self, partition: int) -> None:
            super().__init__()
            self.partition = partition
            self.linear = linear()

        def forward(self, x: Tensor) -> Tensor:
            assert log.running.task.partition == self.partition
            seen.append((log.running.task, is_checkpointing(), is_recomputing()))
            y: Tensor = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append((log.running.task, False, False)))
            return y

    model, log, partitions = observed(nn.Sequential(*map(Witness, range(3))), [1, 1, 1], 4, way)
    model(torch.randn(8, 4)).sum().backward()
    count = checkpointed(way["checkpoint"], 4)
    assert set(seen) == {
        (task, task.kind == "forward" and task.micro_batch < count, task.kind == "recompute")
        for task in expected_tasks(4, partitions, way["checkpoint"])
    }


@pytest.mark.parametrize("mode", ["no_grad", "frozen"])
def test_only_forwards_without_gradients(mode: str, way: dict[str, Any]) -> None:
    model, log, partitions = observed(linears(), [2, 4], 4, way)
    model.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(torch.randn(8, 4))
    assert Counter(log.started) == Counter(tasks("forward", 4, partitions))


def test_copies_between_devices_belong_to_the_sender() -> None:
    model = GPipe(linears(), [2, 4], devices=["cpu", "meta"], chunks=2)
    log = model.observer = Log()
    with torch.no_grad():
        model(torch.randn(4, 4))
    assert [task for task in log.ended if task.kind == "copy"] == [Task("copy", i, 0) for i in range(2)]
