"""Leaves, their exchange for parameters, and the gate: to autograd a partition is one function of its parameters."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.parameters import InPlace, Leaves, gate

CPU, META = torch.device("cpu"), torch.device("meta")


class Kind(nn.Parameter):
    """A kind of parameter that a layer may look for."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(2))
        self.kind = Kind(torch.ones(2))
        self.marked = nn.Parameter(torch.ones(2))
        self.marked.decay = 0.1  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.plain
        self.register_parameter("absent", None)


NAMES = ("plain", "kind", "marked", "frozen", "tied", "absent")


def leaves_of(*modules: nn.Module) -> Leaves:
    return Leaves(modules)


def held(layer: nn.Module) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in NAMES}


def test_what_takes_the_place_of_a_parameter() -> None:
    layer = Layer()
    before = held(layer)
    leaves = leaves_of(layer)
    assert leaves.parameters == [layer.plain, layer.kind, layer.marked]
    with leaves.in_place():
        within = held(layer)
    assert held(layer) == before

    assert within["frozen"] is before["frozen"] and within["absent"] is None
    assert within["tied"] is within["plain"] is not before["plain"]
    assert [type(within[name]) for name in ("plain", "kind", "marked")] == [nn.Parameter, Kind, nn.Parameter]
    assert within["marked"].decay == 0.1
    for name in ("plain", "kind", "marked"):
        leaf = within[name]
        assert leaf.is_leaf and leaf.requires_grad and leaf.data_ptr() == before[name].data_ptr()


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"LazyLinear has no shape for 'weight'.*run the layers once, then train"):
        leaves_of(nn.LazyLinear(2))


def test_a_layer_may_change_what_it_holds_within() -> None:
    layer = Layer()
    before = held(layer)
    with leaves_of(layer).in_place():
        layer.plain = nn.Parameter(torch.zeros(2))
        layer.register_parameter("more", nn.Parameter(torch.zeros(2)))
    assert held(layer) == before
    assert not hasattr(layer, "more")


def test_within_each_other_and_after_an_error() -> None:
    layer = Layer()
    before, (leaves, others) = held(layer), (leaves_of(layer), leaves_of(layer))
    with pytest.raises(ArithmeticError), leaves.in_place():
        inner = held(layer)
        with leaves.in_place():
            assert held(layer) == inner
        # Another mini-batch's: a pipeline that is called within its own layers.
        with others.in_place():
            assert held(layer)["plain"] is not inner["plain"]
        assert held(layer) == inner
        raise ArithmeticError
    assert held(layer) == before


class Place(dict[str, Any]):
    """A module's attributes, that are interrupted when they are set for the `count`-th time from now."""

    count = 0

    def __setitem__(self, key: str, value: object) -> None:
        Place.count -= 1
        if Place.count == 0:
            raise KeyboardInterrupt
        super().__setitem__(key, value)


@pytest.mark.parametrize("count", range(1, 7))
def test_an_interrupt_leaves_nothing_exchanged(count: int) -> None:
    places = [Place(held="parameter") for _ in range(3)]
    Place.count = count
    with pytest.raises(KeyboardInterrupt), InPlace("held", places, ["leaf"] * 3):  # type: ignore[arg-type]
        assert [place["held"] for place in places] == ["leaf"] * 3
    gc.collect()
    assert [place["held"] for place in places] == ["parameter"] * 3


class TestGate:
    def test_gives_the_sums_to_each_parameter_once(self) -> None:
        layer, calls = Layer(), []
        layer.plain.register_hook(lambda grad: calls.append(grad.tolist()))
        leaves = leaves_of(layer)
        opened = gate(leaves, CPU)
        assert opened.numel() == 0
        for factor in (1, 2):
            with leaves.in_place():
                (layer.plain * factor + layer.tied * layer.marked).sum().backward()
        assert calls == []
        opened.backward(torch.empty(0))
        assert calls == [[1 + 2 + 1 + 1] * 2]
        assert [None if p.grad is None else p.grad.tolist() for p in leaves.parameters] == [[5, 5], None, [2, 2]]

    def test_is_on_the_device_of_the_gradients(self) -> None:
        opened = gate(leaves_of(Layer().to("meta")), META)
        assert opened.device == META

    def test_is_there_for_parameters_only(self) -> None:
        assert gate(leaves_of(Layer().requires_grad_(False), nn.ReLU()), CPU).is_leaf


class TestBackwards:
    """Backwards through one mini-batch, by their numbers."""

    @staticmethod
    def sum_up(leaves: Leaves, layer: Layer) -> None:
        with leaves.in_place():
            layer.plain.sum().backward()

    def test_one_begins_once(self) -> None:
        leaves = leaves_of(Layer())
        assert [leaves.begin(number) for number in (4, 4, 7, 7)] == [True, False, True, False]

    def test_what_a_failed_one_left_is_dropped(self) -> None:
        layer = Layer()
        leaves = leaves_of(layer)
        leaves.begin(1)
        self.sum_up(leaves, layer)
        leaves.begin(2)
        assert leaves.take() == [None] * 3

    def test_two_at_once_are_refused(self) -> None:
        leaves = leaves_of(Layer())
        leaves.begin(1)
        leaves.begin(2)
        with pytest.raises(RuntimeError, match="two backwards go through one mini-batch at the same time"):
            leaves.begin(1)
