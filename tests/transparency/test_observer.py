"""The observer sees every task once, by its right name, in the thread that runs it and in an order that can be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.observe import Task
from torchgpipe.skip import pop, skippable, stash

from ..plain import piped

BALANCES = [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2]]


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


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def observed(module: nn.Sequential, balance: list[int], chunks: int, way: dict[str, Any]) -> tuple[GPipe, Log]:
    model = piped(module, balance, chunks, **way)
    log = model.observer = Log()
    return model, log


def checkpointed(m: int, checkpoint: str) -> int:
    return {"always": m, "except_last": m - 1, "never": 0}[checkpoint]


def expected_tasks(m: int, n: int, checkpoint: str) -> set[Task]:
    everywhere = [(i, j) for i in range(m) for j in range(n)]
    return {
        *(Task("forward", i, j) for i, j in everywhere),
        *(Task("recompute", i, j) for i, j in everywhere if i < checkpointed(m, checkpoint)),
        *(Task("backward", i, j) for i, j in everywhere),
    }


@pytest.mark.parametrize("batch, chunks, m", [(8, 1, 1), (8, 4, 4), (13, 8, 7)])
@pytest.mark.parametrize("balance", BALANCES, ids=lambda b: f"n{len(b)}")
def test_every_task_once_and_in_order(balance: list[int], batch: int, chunks: int, m: int, way: dict[str, Any]) -> None:
    n = len(balance)
    model, log = observed(layers(), balance, chunks, way)
    for _ in range(2):
        log.started.clear(), log.ended.clear()
        y = model(torch.randn(batch, 4))
        assert set(log.started) == set(log.ended) == {Task("forward", i, j) for i in range(m) for j in range(n)}
        y.sum().backward()
        assert max(Counter(log.started).values()) == 1
        assert set(log.started) == set(log.ended) == expected_tasks(m, n, way["checkpoint"])

    def before(earlier: Task, later: Task) -> bool:
        return log.ended.index(earlier) < log.ended.index(later)

    for i in range(m):
        for j in range(n):
            if j:
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
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert log.running.task.partition == self.partition
            seen.append((log.running.task, is_checkpointing(), is_recomputing()))
            y: Tensor = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda grad: seen.append((log.running.task, False, False)))
            return y

    model, log = observed(nn.Sequential(*map(Witness, range(3))), [1, 1, 1], 4, way)
    model(torch.randn(8, 4)).sum().backward()
    count = checkpointed(4, way["checkpoint"])
    assert set(seen) == {
        (task, task.kind == "forward" and task.micro_batch < count, task.kind == "recompute")
        for task in expected_tasks(4, 3, way["checkpoint"])
    }


@pytest.mark.parametrize("mode", ["no_grad", "frozen"])
def test_only_forwards_without_gradients(mode: str, way: dict[str, Any]) -> None:
    model, log = observed(layers(), [2, 4], 4, way)
    model.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(torch.randn(8, 4))
    assert Counter(log.started) == Counter(Task("forward", i, j) for i in range(4) for j in range(2))


def test_recomputation_of_a_partition_whose_skip_alone_takes_a_gradient(way: dict[str, Any]) -> None:
    @skippable(stash=["skip"])
    class Stash(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", super().forward(x))
            return x.argmax(1)

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return skip * x.unsqueeze(1)

    model, log = observed(nn.Sequential(Stash(4, 4), Pop()), [1, 1], 4, way)
    model(torch.randn(8, 4)).sum().backward()
    assert Counter(log.started) == Counter(expected_tasks(4, 2, way["checkpoint"]))


def test_an_observer_changes_nothing(way: dict[str, Any]) -> None:
    model, found = piped(layers(), [2, 2, 2], 4, **way), []
    observers: list[Callable[[Task], Any] | None] = [None, Log()]
    for model.observer in observers:
        model.zero_grad()
        y = model(torch.ones(8, 4))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert_close(*found, rtol=0, atol=0)


def test_copies_between_devices_belong_to_the_sender() -> None:
    model = GPipe(layers(), [2, 4], devices=["cpu", "meta"], chunks=2)
    log = model.observer = Log()
    with torch.no_grad():
        model(torch.randn(4, 4))
    assert [task for task in log.ended if task.kind == "copy"] == [Task("copy", i, 0) for i in range(2)]
