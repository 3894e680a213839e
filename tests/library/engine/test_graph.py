"""The graph engine: the graph that it makes, and the order of its tasks. On CUDA, see test_simulated.py."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.engine.schedule import clock_cycles
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Task


def pipeline(n: int, m: int, checkpoint: Any, devices: list[str]) -> GPipe:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    return GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint=checkpoint, engine="graph")


def graph(y: Tensor) -> list[Any]:
    """Return the nodes behind a tensor."""
    seen: dict[Any, None] = {}
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(seen)


# Devices, what is around, checkpointing; and whether tasks and gates are nodes, or the layers' own graph is all.
NODES = [
    (["cpu"] * 2, "", "never", False),
    (["cpu"] * 2, "", "except_last", True),
    (["cpu"] * 2, "", "always", True),
    (["cpu"] * 2, "observer", "never", True),
    (["cpu"] * 2, "autocast", "never", True),
    (["cpu", "meta"], "", "never", True),
    (["meta"], "", "never", False),
]


@pytest.mark.parametrize(("devices", "around", "checkpoint", "apart"), NODES)
def test_nodes(devices: list[str], around: str, checkpoint: Any, apart: bool) -> None:
    m, n = 3, len(devices)
    model = pipeline(n, m, checkpoint, devices)
    model.observer = (lambda task: nullcontext()) if around == "observer" else None
    with torch.autocast("cpu", enabled=around == "autocast"):
        y = model(torch.rand(m, 2))
    found = Counter(node.name() for node in graph(y))
    assert found["_TaskNodeBackward"] == apart * m * n
    assert found["_GateBackward"] == apart * n
    # All that goes from one task to the next device is one node.
    assert found["_CopyBackward"] == m * (len(set(devices)) - 1)
    # Without streams, backward has one order anyway.
    assert found["_RecomputationBackward"] == 0
    assert sum("Addmm" in name for name in found.elements()) == (0 if apart else m * n)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (4, 1), (3, 2), (3, 4)])
def test_order_of_all_tasks(m: int, n: int, checkpoint: Any) -> None:
    """Forward goes by clock cycles; backward through them in reverse, each recomputation just before its task."""
    model = pipeline(n, m, checkpoint, ["cpu"] * n)
    log: list[Task] = []
    model.observer = lambda task: nullcontext(log.append(task))  # type: ignore[func-returns-value]
    model(torch.rand(m, 2)).sum().backward()

    forward = [task for cycle in clock_cycles(m, n) for task in cycle]
    expected = [Task("forward", i, j) for i, j in forward]
    for i, j in reversed(forward):
        expected += [Task("recompute", i, j)] * (i < checkpointed(checkpoint, m)) + [Task("backward", i, j)]
    assert log == expected


class Fails(nn.Linear):
    """Fail in its second backward."""

    backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return y

    def hook(self, grad: Tensor) -> None:
        self.backwards += 1
        if self.backwards == 2:
            raise ArithmeticError


class Apart(nn.Linear):
    """Give out two tensors, of which the second does not depend on the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, self.weight * 2


def test_what_a_backward_that_failed_has_left_is_not_handed_to_the_next() -> None:
    model = GPipe(nn.Sequential(Fails(2, 2), Apart(2, 2)), [1, 1], devices=["cpu"] * 2, chunks=2, engine="graph")
    one, other = model(torch.ones(2, 2))
    with pytest.raises(ArithmeticError):
        one.sum().backward(retain_graph=True)
    other.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [False, False, True, False]
