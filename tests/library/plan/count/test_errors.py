"""A layer that cannot be counted is named, with its input and what to do, in one line."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.plan.count.count import count

from ...layers import Lambda


def broken(x: Tensor) -> Tensor:
    raise KeyError


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Linear(9, 4), "9"),
        (Lambda(lambda x: x.view(7, -1)), "shape '.*' is invalid"),
        (Lambda(lambda x: x * x.sum().item()), ""),
        (Lambda(lambda x: x if x.sum() > 0 else -x), ""),
        (Lambda(lambda x: x[x > 0]), ""),
        (Lambda(broken), "KeyError"),
    ],
)
def test_names_the_layer(layer: nn.Module, says: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.add_module("odd", layer)
    given = rf"^layer 1 \('odd', {type(layer).__name__}\) fails on \(2, 8\) float32: "
    message = rf"{given}.*{says}.*; check the sample's .* no values"
    with pytest.raises(ValueError, match=message) as raised:
        count(model, torch.empty(3, 4))
    assert "\n" not in str(raised.value) and raised.value.__cause__ is not None
    freed = weakref.ref(model)
    del model, raised
    assert freed() is None, "what the error's frames hold waits for the garbage collector"


def test_names_a_layer_whose_backward_fails() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise RuntimeError("no way back")

    model = nn.Sequential(nn.Linear(4, 8), Lambda(Odd.apply))
    with pytest.raises(ValueError, match=r"layer 1 \('1', Lambda\) fails on \(2, 8\) float32: no way back; check"):
        count(model, torch.empty(3, 4))
