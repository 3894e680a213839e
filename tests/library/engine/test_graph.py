"""The graph engine: the order of its tasks, and what a failure leaves. On CUDA, see test_simulated.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.engine.schedule import clock_cycles
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Task

from ...parts import Fails
from ...plain import piped


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (4, 1), (3, 2), (3, 4)])
def test_order_of_all_tasks(m: int, n: int, checkpoint: Any) -> None:
    """Forward goes by clock cycles; backward through them in reverse, each recomputation just before its task."""
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    model = piped(layers, [1] * n, m, checkpoint=checkpoint, engine="graph")
    log: list[Task] = []
    model.observer = lambda task: nullcontext(log.append(task))  # type: ignore[func-returns-value]
    model(torch.rand(m, 2)).sum().backward()

    forward = [task for cycle in clock_cycles(m, n) for task in cycle]
    expected = [Task("forward", i, j) for i, j in forward]
    for i, j in reversed(forward):
        expected += [Task("recompute", i, j)] * (i < checkpointed(checkpoint, m)) + [Task("backward", i, j)]
    assert log == expected


class Apart(nn.Linear):
    """Give out two tensors, of which the second does not depend on the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, self.weight * 2


def test_what_a_backward_that_failed_has_left_is_not_handed_to_the_next() -> None:
    fails = Fails()
    model = piped(nn.Sequential(nn.Linear(2, 2), fails, Apart(2, 2)), [2, 1], 2, engine="graph")
    one, other = model(torch.ones(2, 2))
    fails.fail("backward", ArithmeticError(), calls_before=1)
    with pytest.raises(ArithmeticError):
        one.sum().backward(retain_graph=True)
    other.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [False, False, True, False]
