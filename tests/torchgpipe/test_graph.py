"""The graph engine: the graph that it makes, and the one order of backward that this graph leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import checkpointed
from torchgpipe.observe import Task
from torchgpipe.schedule import clock_cycles

MODES = ["always", "except_last", "never"]


def pipeline(n: int, m: int, checkpoint: Any, **options: Any) -> GPipe:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(n)))
    return GPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint=checkpoint, engine="graph", **options)


def nodes(y: Tensor) -> Counter[str]:
    """Count the nodes of a graph by name."""
    seen: set[Any] = set()
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen)


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (4, 1), (4, 2), (3, 4)])
def test_nodes(m: int, n: int, checkpoint: str, dependency: bool) -> None:
    model = pipeline(n, m, checkpoint, dependency=dependency)
    # With a gradient for the input, the first partition's tasks have something to be tied by.
    found = nodes(model(torch.rand(m, 2, requires_grad=True)))

    tasks = checkpointed(checkpoint, m) * n  # type: ignore[arg-type]
    tied = dependency and (n > 1 or tasks > 0)
    assert found["_SegmentBackward"] == found["_RecomputeBackward"] == tasks
    # A recomputation is inserted by a fork and a join of its own.
    assert found["_ForkBackward"] == ((m - 1) * n if tied else 0) + tasks
    # A checkpointed task takes the phony itself; another's input is joined to it.
    plain = m - max(1, checkpointed(checkpoint, m))  # type: ignore[arg-type]
    assert found["_JoinBackward"] == (plain * n if tied else 0) + tasks


@pytest.mark.parametrize("grad", ["no_grad", "frozen"])
def test_no_node_without_gradients(grad: str) -> None:
    model = pipeline(3, 4, "always").requires_grad_(grad != "frozen")
    with torch.set_grad_enabled(grad != "no_grad"):
        assert model(torch.rand(4, 2)).grad_fn is None


class Log:
    def __init__(self) -> None:
        self.tasks: list[Task] = []

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        self.tasks.append(task)
        yield


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (4, 1), (3, 2), (3, 4)])
def test_order_of_all_tasks(m: int, n: int, checkpoint: str) -> None:
    """Forward goes by clock cycles; backward through them in reverse, each recomputation just before its task."""
    model = pipeline(n, m, checkpoint)
    log = model.observer = Log()
    model(torch.rand(m, 2)).sum().backward()

    forward = [task for cycle in clock_cycles(m, n) for task in cycle]
    assert log.tasks[: m * n] == [Task("forward", i, j) for i, j in forward]

    backward = [task for task in log.tasks if task.kind == "backward"]
    assert set(backward) == {Task("backward", i, j) for i, j in forward}
    for i, j in forward:
        place = log.tasks.index(Task("backward", i, j))
        if i:
            assert place < log.tasks.index(Task("backward", i - 1, j))
        if j:
            assert place < log.tasks.index(Task("backward", i, j - 1))
        if i < checkpointed(checkpoint, m):  # type: ignore[arg-type]
            assert log.tasks[place - 1] == Task("recompute", i, j)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("switch", ["dependency", "copy_streams", "portals"])
def test_switches_change_no_result(switch: str, checkpoint: str) -> None:
    results = []
    for on in (True, False):
        torch.manual_seed(0)
        model = pipeline(3, 4, checkpoint, **{switch: on})
        y = model(torch.rand(8, 2))
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def follows(node: Any, task: tuple[str, int, int]) -> bool:
    """Return whether backward reaches a task's node from `node`, so that it has to come after it."""
    seen: set[Any] = set()
    waiting = [following for following, _ in node.next_functions]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == task[0] and (node.node.i, node.node.j) == task[1:]:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def tasks(y: Tensor) -> dict[tuple[str, int, int], Any]:
    found: dict[tuple[str, int, int], Any] = {}
    seen: set[Any] = set()
    waiting = [y.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("_SegmentBackward", "_RecomputeBackward"):
            found[node.name(), node.node.i, node.node.j] = node
        waiting += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_recomputation_lies_between_its_backward_and_the_one_of_the_next_micro_batch(n: int, checkpoint: str) -> None:
    # By the edges of the graph alone: on a GPU the two are run by different threads of the engine.
    m = 3
    output = pipeline(n, m, checkpoint)(torch.randn(m, 2))  # nodes have edges for as long as their graph is there
    found = tasks(output)
    recomputed = [(i, j) for name, i, j in found if name == "_RecomputeBackward"]
    assert len(recomputed) == checkpointed(checkpoint, m) * n  # type: ignore[arg-type]
    for i, j in recomputed:
        assert follows(found["_RecomputeBackward", i, j], ("_SegmentBackward", i, j))
        if ("_SegmentBackward", i + 1, j) in found:
            assert follows(found["_SegmentBackward", i + 1, j], ("_RecomputeBackward", i, j))
