"""Leaves, and their exchange for parameters. What layers see of it is in tests/behaviours."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.task.parameters import InPlace, Leaves


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.plain
        self.register_parameter("absent", None)


NAMES = ("plain", "frozen", "tied", "absent")


def held(layer: nn.Module) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in NAMES}


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
