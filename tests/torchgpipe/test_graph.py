"""The graph engine: the graph that it makes, and the one order of backward that this graph leaves."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import checkpointed
from torchgpipe.observe import Task
from torchgpipe.schedule import clock_cycles


def pipeline(n: int, m: int, checkpoint: Any, devices: list[Any] | None = None, **options: Any) -> GPipe:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    devices = devices or ["cpu"] * n
    return GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint=checkpoint, engine="graph", **options)


def several(n: int) -> list[torch.device]:
    """Return devices that have streams, with the fixture of that name."""
    return [torch.device("cpu", j) for j in range(n)]


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
    model = pipeline(n, m, checkpoint)
    log: list[Task] = []
    model.observer = lambda task: nullcontext(log.append(task))
    model(torch.rand(m, 2)).sum().backward()

    forward = [task for cycle in clock_cycles(m, n) for task in cycle]
    expected = [Task("forward", i, j) for i, j in forward]
    for i, j in reversed(forward):
        expected += [Task("recompute", i, j)] * (i < checkpointed(checkpoint, m)) + [Task("backward", i, j)]
    assert log == expected


Place = tuple[str, int, int]


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize("on", [(0, 0), (0, 1), (0, 0, 1)])
def test_ties(on: tuple[int, ...], checkpoint: Any, dependency: bool, streams: Any) -> None:
    """What has to come before what in backward, by the edges alone: on CUDA several threads of autograd run it."""
    m, n = 3, len(on)
    y = pipeline(n, m, checkpoint, [several(2)[k] for k in on], dependency=dependency)(torch.rand(m, 2))
    several_threads = len(set(on)) > 1
    expected: set[tuple[Place, Place]] = set()
    for i in range(m):
        for j in range(n):
            task = before = ("_TaskNode", i, j)
            ties: list[Place] = [("_TaskNode", i + 1, j)] if dependency and i + 1 < m else []
            if j + 1 < n:
                sender = following = ("_TaskNode", i, j + 1)
                if on[j] != on[j + 1]:
                    sender = ("_Copy", i, j)
                    expected.add((following, sender))
                expected.add((sender, task))
                ties.append(sender)
            # Where a recomputation has nothing to wait for, its task does it.
            if i < checkpointed(checkpoint, m) and ties and several_threads:
                before = ("_Recomputation", i, j)
                expected.add((before, task))
            expected |= {(tie, before) for tie in ties if several_threads}
    if checkpoint == "never" and not several_threads:
        expected = set()  # the layers' own graph is all
    assert edges(y) == expected


def edges(y: Tensor) -> set[tuple[Place, Place]]:
    """Return which nodes of tasks and copies have an edge to which, so that they come before them in backward."""

    def place(node: Any) -> Place | None:
        name = node.name().removesuffix("Backward")
        if name == "_Copy":
            return name, node.i, node.route._ends[0]
        return (name, node.task.i, node.task.stage.index) if name in ("_TaskNode", "_Recomputation") else None

    found = set()
    for node in graph(y):
        for following, _ in node.next_functions:
            if following is not None and place(node) and place(following):
                found.add((place(node), place(following)))
    return found  # type: ignore[return-value]


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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight * 2


def test_what_a_backward_that_failed_has_left_is_not_handed_to_the_next() -> None:
    model = GPipe(nn.Sequential(Fails(2, 2), Apart(2, 2)), [1, 1], devices=["cpu"] * 2, chunks=2, engine="graph")
    one, other = model(torch.ones(2, 2))
    with pytest.raises(ArithmeticError):
        one.sum().backward(retain_graph=True)
    other.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [False, False, True, False]
