"""A layer that cannot be counted is named, with its input and what to do, in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.plan.count import count


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def broken(x: Tensor) -> Tensor:
    raise KeyError


NO_VALUES = "tensors have shapes and no values: let it ask for shapes only, or find the balance with torchgpipe.balance"


@pytest.mark.parametrize(
    ("layer", "says", "advice"),
    [
        (nn.Linear(9, 4), "9", "check the sample's shape and type"),
        (Apply(lambda x: x.view(7, -1)), "shape '.*' is invalid", "check the sample's shape and type"),
        (Apply(lambda x: x * x.sum().item()), "", NO_VALUES),
        (Apply(lambda x: x if x.sum() > 0 else -x), "", NO_VALUES),
        (Apply(lambda x: x[x > 0]), "", NO_VALUES),
        (Apply(broken), "KeyError", "check the sample's"),
    ],
)
def test_names_the_layer(layer: nn.Module, says: str, advice: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    model.add_module("odd", layer)
    message = rf"^layer 1 \('odd', {type(layer).__name__}\) fails on \(2, 8\) float32: .*{says}.*; .*{advice}"
    with pytest.raises(ValueError, match=message) as raised:
        count(model, torch.empty(3, 4))
    assert "\n" not in str(raised.value) and raised.value.__cause__ is not None


def test_names_a_layer_whose_backward_fails() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise RuntimeError("no way back")

    model = nn.Sequential(nn.Linear(4, 8), Apply(Odd.apply))
    with pytest.raises(ValueError, match=r"layer 1 \('1', Apply\) fails on \(2, 8\) float32: no way back; check"):
        count(model, torch.empty(3, 4))
