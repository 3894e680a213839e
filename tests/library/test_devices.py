"""Test that a pipeline cannot be moved to other devices. A move to its own devices does nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchgpipe import GPipe


def pipeline() -> GPipe:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"])


STAYS: dict[str, Callable[[GPipe], GPipe]] = {
    "to the device": lambda model: model.to("cpu"),
    "to a tensor's device": lambda model: model.to(torch.rand(1)),
    "cpu": lambda model: model.cpu(),
}


@pytest.mark.parametrize("way", STAYS)
def test_where_it_is_already(way: str) -> None:
    model = pipeline()
    assert STAYS[way](model) is model


def test_the_type_may_change_along_with_the_device() -> None:
    assert {x.dtype for x in pipeline().to("cpu", torch.float64).parameters()} == {torch.float64}


MOVES: dict[str, Callable[[GPipe], GPipe]] = {
    "to": lambda model: model.to("cuda:7"),
    "to meta": lambda model: model.to(device="meta"),
    "to a tensor's device": lambda model: model.to(torch.rand(1, device="meta")),
    "cuda": lambda model: model.cuda(),
    "cuda by number": lambda model: model.cuda(1),
}


@pytest.mark.parametrize("way", MOVES)
def test_elsewhere(way: str) -> None:
    with pytest.raises(TypeError, match="cannot be moved; name the devices when wrapping"):
        MOVES[way](pipeline())


def test_its_text_fits_on_a_screen() -> None:
    model = pipeline()
    assert repr(model).splitlines() == [
        "GPipe(balance=[1, 1], chunks=1, checkpoint='except_last', schedule='GPipe'):",
        "  stage 0 on cpu: 1 layer, 6 parameters",
        "  stage 1 on cpu: 1 layer, 4 parameters",
    ]
    assert repr(model.schedule).splitlines()[0] == "GPipe, stages on [0, 1]"
