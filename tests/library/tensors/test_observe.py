"""The observer: its context is left by errors, and its own errors arrive. What it sees is in tests/behaviours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.tensors.observe import Task

from ...plain import piped


def pipeline(observer: Callable[[Task], Any], last: nn.Module, engine: str) -> GPipe:
    model = piped(nn.Sequential(nn.Linear(2, 2), last), [1, 1], 2, checkpoint="always", engine=engine)
    model.observer = observer
    return model


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_its_context_is_left_by_an_error(engine: str) -> None:
    ended: list[tuple[Task, type[BaseException] | None]] = []

    @contextmanager
    def observer(task: Task) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            ended.append((task, type(error)))
            raise
        ended.append((task, None))

    with pytest.raises(ZeroDivisionError):
        pipeline(observer, Fails(), engine)(torch.rand(1, 2))
    assert ended == [(Task("forward", 0, 0), None), (Task("forward", 0, 1), ZeroDivisionError)]


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_its_own_error_is_a_tasks_error(engine: str, kind: str) -> None:
    def observer(task: Task) -> AbstractContextManager[object]:
        if task == (kind, 1, 0):
            raise LookupError(f"in {task.kind}")
        return nullcontext()

    model = pipeline(observer, nn.Linear(2, 2), engine)
    with pytest.raises(LookupError, match=f"in {kind}"):
        model(torch.rand(4, 2)).sum().backward()

    model.observer = None
    model(torch.rand(4, 2)).sum().backward()
