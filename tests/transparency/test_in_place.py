"""Changes in place: by layers, of their inputs and buffers; and by the caller, of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ..plain import piped
from .compare import EXACT, assert_transparent, both, state
from .layers import KINDS, WIDTH


class AddOne(nn.Module):
    """Work in place, and not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {"relu": lambda: nn.ReLU(inplace=True), "add": AddOne}


@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2]], ids=["within a partition", "at a partition's start"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_in_place(kind: str, balance: list[int], way: dict[str, Any]) -> None:
    make = IN_PLACE[kind]
    module = nn.Sequential(nn.Linear(5, 5), make(), nn.Linear(5, 5), make(), nn.Linear(5, 4))
    x = torch.randn(7, 5).requires_grad_()
    # A layer that says so (`inplace`) gets a copy to work on.
    if len(balance) == 2 or way["checkpoint"] == "never" or kind == "relu":
        assert_transparent(module, x, balance, steps=3, **way)
    else:
        with pytest.raises(RuntimeError, match=r"partition 1 changed its input in place.*checkpoint='never'"):
            assert_transparent(module, x, balance, **way)


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]], ids=str)
def test_in_place_at_the_models_start(balance: list[int], way: dict[str, Any]) -> None:
    # The plain layers get a ReLU that is not in place: micro-batches are views of one tensor, and PyTorch refuses to
    # change a view of a tensor that is split.
    plain, model = both(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5), nn.Tanh()), balance, **way)
    plain[0] = nn.ReLU()
    x = torch.randn(7, 5)
    before = x.clone()
    y = model(x)
    assert torch.equal(x, before)
    y.square().sum().backward()
    plain(x).square().sum().backward()
    assert_close(state(model), state(plain), **EXACT)


@pytest.mark.parametrize("engine", ["graph"])  # when workers use it again is left to chance
def test_an_output_whose_memory_is_used_again_is_refused(way: dict[str, Any]) -> None:
    module = nn.Sequential(KINDS["and its buffer in place"](None), KINDS["sum"](None))
    with pytest.raises(RuntimeError, match="was changed in place before the partition took it"):
        piped(module, [1, 1], **way)(torch.randn(9, WIDTH))


@pytest.mark.parametrize(
    "engine, checkpoint", [("graph", "always"), ("workers", "always"), ("workers", "never"), ("ranks", "never")]
)
def test_an_output_changed_in_place_changes_nothing_else(way: dict[str, Any]) -> None:
    """Also where there is one micro-batch, whose outputs are not concatenated."""
    x = torch.randn(7, WIDTH).requires_grad_()
    one, other = piped(nn.Sequential(nn.Identity(), KINDS["twice"](None)), [1, 1], 1, **way)(x)
    before = x.detach().clone()
    one.add_(1)
    other.mul_(2)
    assert torch.equal(one, before + 1)
    assert torch.equal(other, before * 2)
    assert torch.equal(x, before)


@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_changing_an_output_that_backward_needs_is_noticed(way: dict[str, Any]) -> None:
    # Sigmoid's backward needs its output. One micro-batch, since concatenation makes a copy.
    model = piped(nn.Sequential(nn.Linear(5, 5), nn.Sigmoid()), [1, 1], 1, **way)
    y = model(torch.randn(7, 5))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
