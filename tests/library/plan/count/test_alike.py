"""Which layers behave alike: those that differ in nothing but the contents of tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from reproduce.models import unet
from torchgpipe.plan.count.alike import Alike
from torchgpipe.skip.skippable import skips_of

X = torch.empty(4, 6)


class Pair(nn.Module):
    """Two parameters of one shape, cut from storages of 12 numbers."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


def untied() -> nn.Module:
    return Pair(torch.rand(12)[:6], torch.rand(12)[:6])


def tied() -> nn.Module:
    whole = torch.rand(12)
    return Pair(whole[:6], whole[:6])


def side_by_side() -> nn.Module:
    whole = torch.rand(12)
    return Pair(whole[:6], whole[6:])


def linear() -> nn.Module:
    return nn.Linear(6, 6)


@pytest.mark.parametrize("build", [linear, untied, tied, side_by_side, lambda: nn.Dropout(0.1)])
def test_alike_whatever_tensors_contain(build: Callable[[], nn.Module]) -> None:
    assert Alike().behaviour(build(), X) == Alike().behaviour(build(), torch.ones(4, 6)) is not None


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(False)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (untied, tied),
        (untied, side_by_side),
        (tied, side_by_side),
        (linear, frozen),
        (linear, lambda: nn.Linear(6, 7)),
        (linear, lambda: nn.Linear(6, 6, dtype=torch.float64)),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (linear, lambda: nn.Linear(6, 6).eval()),
    ],
)
def test_unlike(a: Callable[[], nn.Module], b: Callable[[], nn.Module]) -> None:
    assert Alike().behaviour(a(), X) != Alike().behaviour(b(), X)


def test_what_comes_in_matters() -> None:
    layer = linear()
    others = (torch.empty(5, 6), torch.empty(6, 4).t(), X.double(), torch.empty(4, 6, requires_grad=True))
    assert all(Alike().behaviour(layer, X) != Alike().behaviour(layer, x) for x in others)
    assert Alike().behaviour(layer, X, "first") != Alike().behaviour(layer, X, "later")


def test_unknown_for_skips_and_what_cannot_be_pickled() -> None:
    layer = linear()
    layer.made_here = lambda: None  # type: ignore[assignment]
    assert Alike().behaviour(layer, X) is None
    with_skips = [layer for layer in unet(2, 1, 4) if any(skips_of(layer))]
    assert with_skips
    assert all(Alike().behaviour(layer, X) is None for layer in with_skips)
