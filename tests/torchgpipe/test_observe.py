"""The observer: a context around a task, in the thread that runs it. What it sees is in tests/transparency."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.observe import Task, observed

ENGINES = ["graph", "workers"]


def test_a_task_is_a_tuple() -> None:
    task = Task("forward", 2, 1)
    assert task == ("forward", 2, 1)
    assert (task.kind, task.micro_batch, task.partition) == task


def test_without_observer_nothing_is_entered() -> None:
    with observed(None, "forward", 0, 0) as entered:
        assert entered is None


def test_the_observer_gets_the_task_and_its_context_is_entered() -> None:
    tasks: list[Task] = []

    def observer(task: Task) -> AbstractContextManager[object]:
        tasks.append(task)
        return nullcontext("entered")

    with observed(observer, "recompute", 3, 1) as entered:
        assert entered == "entered"
    assert tasks == [Task("recompute", 3, 1)]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("engine", ENGINES)
def test_its_context_is_left_by_an_error(engine: Any) -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), Fails()), [1, 1], devices=["cpu"] * 2, chunks=1, engine=engine)
    ended: list[tuple[Task, type[BaseException] | None]] = []

    @contextmanager
    def observer(task: Task) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            ended.append((task, type(error)))
            raise
        ended.append((task, None))

    model.observer = observer
    with pytest.raises(ZeroDivisionError):
        model(torch.rand(4, 2))

    assert ended == [(Task("forward", 0, 0), None), (Task("forward", 0, 1), ZeroDivisionError)]


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("engine", ENGINES)
def test_its_own_error_is_a_tasks_error(engine: Any, kind: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always", engine=engine)

    def observer(task: Task) -> AbstractContextManager[object]:
        if task == (kind, 1, 0):
            raise LookupError(f"in {task.kind}")
        return nullcontext()

    model.observer = observer
    with pytest.raises(LookupError, match=f"in {kind}"):
        model(torch.rand(4, 2)).sum().backward()

    model.observer = None
    model(torch.rand(4, 2)).sum().backward()
