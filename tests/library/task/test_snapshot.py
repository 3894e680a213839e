"""Test that a recomputation sees earlier buffers, while other threads see the current buffers."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing

from ...behaviours.parts.layers import Do


def look(layer: Any) -> tuple[dict[str, float], float, bool]:
    """Return a layer's state dict as numbers, its `count`, and its training mode."""
    state = {name: float(x) for name, x in layer.state_dict().items()}
    return state, float(layer.count), layer.training


def count(layer: Any, x: Tensor) -> Tensor:
    layer.count = layer.count + 1
    if is_recomputing():
        here = look(layer)
        there = layer.elsewhere.submit(look, layer).result()
        layer.seen.append((here, there))
    return x * layer.count


@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_other_threads_find_the_real_buffers(engine: Any) -> None:
    counting: Any = Do(count, count=torch.zeros(()))
    counting.seen = []
    layers = nn.Sequential(nn.Linear(2, 2), counting, nn.Linear(2, 2))
    options: dict[str, Any] = {"chunks": 3, "checkpoint": "always", "engine": engine}
    with ThreadPoolExecutor(1) as counting.elsewhere:
        model = GPipe(layers, [2, 1], devices=["cpu"] * 2, **options)
        model(torch.rand(6, 2)).sum().backward()
    # Micro-batches are recomputed from the last to the first. Each recomputation gets the buffers
    # as they were before the first forward of its micro-batch.
    for (here, there), n in zip(counting.seen, (3.0, 2.0, 1.0), strict=True):
        assert here == ({"count": n}, n, True)
        assert there == ({"count": 3.0}, 3.0, True)
    assert layers.state_dict()["1.count"] == 3
    assert type(counting._buffers) is dict


def test_a_copy_that_another_thread_makes_meanwhile_is_as_the_layers_are() -> None:
    copies: list[nn.Sequential] = []

    def scale(layer: Any, x: Tensor) -> Tensor:
        layer.count = layer.count + 1
        if is_recomputing():
            copied = layer.elsewhere.submit(copy.deepcopy, layers[:2]).result()
            copies.append(copied)
        return x * layer.count

    counting: Any = Do(scale, count=torch.zeros(()))
    layers = nn.Sequential(nn.BatchNorm1d(2), counting, nn.Linear(2, 2))
    with ThreadPoolExecutor(1) as pool:
        counting.__dict__["elsewhere"] = Elsewhere(pool)
        model = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
        model(torch.rand(4, 2)).sum().backward()
    assert len(copies) == 2
    for each in copies:
        for module in each.modules():
            assert type(module._buffers) is dict
        assert float(each[1].count) == 2  # type: ignore[arg-type]


class Elsewhere:
    """Runs functions in another thread. Copies of a layer share this object."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.submit = pool.submit

    def __deepcopy__(self, _: object) -> "Elsewhere":
        return self


def test_a_buffer_that_no_pass_changes_stays_in_place_in_a_recomputation() -> None:
    found: list[int] = []

    def scale(layer: Any, x: Tensor) -> Tensor:
        found.append(id(layer.by))
        return x * layer.by

    scaled: Any = Do(scale, by=torch.ones(2))
    layers = nn.Sequential(nn.Linear(2, 2), scaled)
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    model(torch.rand(4, 2)).sum().backward()
    assert found == [id(scaled.by)] * 4


def test_what_another_thread_writes_meanwhile_stays() -> None:
    counting: Any = Do(count, count=torch.zeros(()))

    class Writing(list[Any]):
        def append(self, item: Any) -> None:
            seven = torch.tensor(7.0)
            counting.elsewhere.submit(setattr, counting, "count", seven).result()

    counting.seen = Writing()
    layers = nn.Sequential(nn.Linear(2, 2), counting, nn.Linear(2, 2))
    with ThreadPoolExecutor(1) as counting.elsewhere:
        model = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=1, checkpoint="always")
        model(torch.rand(6, 2)).sum().backward()
    assert counting.count == 7
