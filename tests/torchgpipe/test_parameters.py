"""Leaves, their exchange for parameters, and the gate: to autograd a partition is one function of its parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.parameters import InPlace, Leaves, gate


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


def held(layer: nn.Module) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in NAMES}


def test_what_takes_the_place_of_a_parameter() -> None:
    layer = Layer()
    before = held(layer)
    leaves = Leaves([layer])
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
        Leaves([nn.LazyLinear(2)])


def test_the_parameters_are_back_after_all_that_happens_within() -> None:
    layer = Layer()
    before, (leaves, others) = held(layer), (Leaves([layer]), Leaves([layer]))
    with pytest.raises(ArithmeticError), leaves.in_place():
        inner = held(layer)
        with leaves.in_place():
            assert held(layer) == inner
        # Another mini-batch's: a pipeline that is called within its own layers.
        with others.in_place():
            assert held(layer)["plain"] is not inner["plain"]
        assert held(layer) == inner
        layer.plain = nn.Parameter(torch.zeros(2))
        layer.register_parameter("more", nn.Parameter(torch.zeros(2)))
        raise ArithmeticError
    assert held(layer) == before
    assert not hasattr(layer, "more")


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


def test_the_gate_is_on_the_device_of_the_gradients() -> None:
    assert gate(Leaves([Layer().to("meta")]), torch.device("meta")).is_meta


def replaced(layer: nn.Module) -> None:
    layer.plain = nn.Parameter(torch.zeros(2))


def frozen(layer: nn.Module) -> None:
    layer.plain.requires_grad_(False)


@pytest.mark.parametrize("change", [replaced, frozen])
def test_a_forward_that_changes_which_parameters_there_are_is_refused(change: Callable[[Any], object]) -> None:
    layer = Layer()
    leaves = Leaves([layer])
    with leaves.in_place():
        change(layer)
    with pytest.raises(RuntimeError, match="partition 3 replaced, added or froze a parameter in its forward"):
        leaves.check_kept(3)
