"""Test which buffers, modes and hooks of layers are seen during a recomputation.

Only the recomputation itself sees the buffers as they were in its forward. During a recomputation,
modes and hooks are restored for all threads.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing
from torchgpipe.task.guards.layers import UnchangedLayers

from ...behaviours.parts.layers import Do
from ...behaviours.rows.tools.scripted import frozen


def look(layer: Any) -> tuple[dict[str, float], float, bool]:
    """Return three values of a layer: its state as a dictionary of numbers, `count`, and its mode.

    The mode is whether the layer is in training mode.
    """
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
    # Recomputations run from the last micro-batch to the first. Each one must get the buffers as
    # they were before the forward of its own micro-batch.
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
    """Runs functions in another thread.

    A layer can have this object as an attribute. A deep copy of the layer then has the same object,
    because threads cannot be copied.
    """

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


def hook(layer: Any, inputs: object, output: object) -> None:
    """Do nothing; a forward hook."""


def dictionaries(layers: nn.Module) -> list[int]:
    """Return the ids of the dictionaries in which modules keep their hooks and their buffers.

    Equal ids before and after show that a dictionary was not replaced by another one.
    """
    found = []
    for module in layers.modules():
        found.append(id(module._forward_hooks))
        found.append(id(module._forward_hooks_with_kwargs))
        found.append(id(module._buffers))
    return found


def modes_and_hooks(layer: nn.Module) -> tuple[bool, list[Any], bool]:
    """Return a layer's training mode, its hooks, and whether its buffers are in a plain dictionary.

    The function also registers a hook and removes it again. This must not change what other threads
    see.
    """
    hooks = [*layer._forward_hooks.values()]
    layer.register_forward_hook(print).remove()
    return layer.training, hooks, type(layer._buffers) is dict


@pytest.mark.parametrize("engine", ["workers", "graph"])
def test_all_threads_find_the_modes_and_hooks_of_the_forward(engine: Any) -> None:
    found: list[Any] = []

    def observe(layer: Any, x: Tensor) -> Tensor:
        if is_recomputing():
            here = modes_and_hooks(layer), modes_and_hooks(norm)
            first, second = pool.map(modes_and_hooks, (layer, norm))
            found.append((*here, first, second))
        return x

    norm = nn.BatchNorm1d(2)
    observed: Any = Do(observe)
    layers = nn.Sequential(nn.Linear(2, 2), norm, observed, nn.Linear(2, 2))
    kept = dictionaries(layers)
    options: dict[str, Any] = {"chunks": 3, "checkpoint": "always", "engine": engine}
    model = GPipe(layers, [3, 1], devices=["cpu"] * 2, **options)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            y = model.train()(torch.rand(6, 2))
            model.eval()
            with observed.register_forward_hook(hook):
                y.sum().backward()
                assert modes_and_hooks(observed) == (False, [hook], True)
            assert dictionaries(layers) == kept
            assert not any(module.training for module in model.modules())
    none: list[Any] = []
    in_forward = (True, none, True)
    of_norm = (True, none, False)  # its buffers are in a dictionary that refuses some reads
    assert found == [(in_forward, of_norm, in_forward, of_norm)] * 9


def test_a_criterion_may_change_hooks_and_its_own_modes_while_other_threads_recompute() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout())
    kept = dictionaries(layers)
    options: dict[str, Any] = {"chunks": 8, "checkpoint": "always", "schedule": "1F1B"}
    model = GPipe(layers, [1, 1, 2], devices=["cpu"] * 3, engine="workers", **options)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        for layer in layers:
            modes_and_hooks(layer)
        layers[3].eval()  # a layer that runs in the thread of the criterion
        layers[3].train()
        return nn.functional.mse_loss(output, target)

    x = torch.rand(16, 4)
    for _ in range(20):
        model.step(criterion, x, x)
        assert dictionaries(layers) == kept
        for module in layers.modules():
            assert module.training
            assert not module._forward_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit.(script|freeze)` is deprecated")
def test_a_frozen_scripted_layer_gets_its_forward_at_the_first_call() -> None:
    """Check that this does not count as a change of the layer between forward and backward."""
    layer: Any = frozen()
    guard = UnchangedLayers(0, [layer])
    assert "forward" not in vars(layer)
    layer(torch.rand(2, 4))
    assert "forward" in vars(layer)
    guard.backward_begins()
