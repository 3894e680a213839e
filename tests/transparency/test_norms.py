"""Normalization: running statistics see every micro-batch once, or every mini-batch once where they are deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import is_recomputing

from ..plain import piped
from .compare import total, transparent


def channels(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


# Layers on inputs of shape (N, 2, 3, 3).
NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": lambda: channels(nn.BatchNorm2d(4)),
    "momentum none": lambda: channels(nn.BatchNorm2d(4, momentum=None)),
    "not affine": lambda: channels(nn.BatchNorm2d(4, affine=False)),
    "no running statistics": lambda: channels(nn.BatchNorm2d(4, track_running_stats=False)),
    "in evaluation by itself": lambda: channels(nn.BatchNorm2d(4).eval()),
    "instance norm": lambda: channels(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "group norm": lambda: channels(nn.GroupNorm(2, 4)),
    "two": lambda: channels(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))),
    "at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4)),
    "at the start": lambda: nn.Sequential(nn.BatchNorm2d(2), *channels(nn.Tanh())[:4]),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 3]], ids=lambda b: f"n{len(b)}")
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: str, balance: list[int], training: bool, way: dict[str, Any]) -> None:
    module = NORMS[norm]() if training else NORMS[norm]().eval()
    outcome = transparent(module, torch.randn(14, 2, 3, 3).requires_grad_(), balance, chunks=4, steps=2, **way)
    if norm == "batch norm":
        assert outcome.buffers["1.num_batches_tracked"] == (2 * 4 if training else 0)


class Fragile(nn.Module):
    """Raise at some call, counted from zero, of the first passes or of the recomputations."""

    left: int | None = None
    second = False

    def forward(self, x: Tensor) -> Tensor:
        if self.left is not None and is_recomputing() == self.second:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError("fragile")
        return x


def test_statistics_are_there_again_after_a_failing_recomputation(way: dict[str, Any]) -> None:
    norm, fragile = nn.BatchNorm2d(4), Fragile()
    fragile.left, fragile.second = 0, True
    y = piped(nn.Sequential(nn.Conv2d(2, 4, 1), norm, fragile), [1, 2], 4, **way)(torch.randn(14, 2, 3, 3))
    expected = {name: b.clone() for name, b in norm.named_buffers()}
    if way["checkpoint"] != "never":
        with pytest.raises(ArithmeticError, match="fragile"):
            y.sum().backward()
    assert norm.track_running_stats
    assert_close(dict(norm.named_buffers()), expected, rtol=0, atol=0)


# Moments of parts are combined, which adds in another order than those of the whole.
COMBINED = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("batch, chunks", [(13, 8), (12, 4), (12, 1), (13, 20), (7, 2)])
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]], ids=str)
def test_deferred_statistics_are_those_of_the_mini_batch(
    balance: list[int], batch: int, chunks: int, way: dict[str, Any]
) -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    whole = nn.BatchNorm2d(4)
    model = piped(module, balance, chunks, deferred_batch_norm=True, **way)
    for step in range(1, 4):
        x = torch.randn(batch, 2, 3, 3) * step + 5
        y = model(x)
        with torch.no_grad():
            whole(module[0](x))
        assert whole.num_batches_tracked == step
        assert_close(dict(model[1].named_buffers()), dict(whole.named_buffers()), **COMBINED)
        y.sum().backward()
        assert_close(dict(model[1].named_buffers()), dict(whole.named_buffers()), **COMBINED)


def test_deferring_changes_neither_outputs_nor_gradients(way: dict[str, Any]) -> None:
    x, found = torch.randn(13, 2, 3, 3), []
    for deferred in (False, True):
        torch.manual_seed(1)
        model = piped(channels(nn.BatchNorm2d(4)), [2, 3], 8, deferred_batch_norm=deferred, **way)
        y = model(x)
        total(y).backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("micro_batch", range(4))
def test_a_failing_forward_leaves_no_deferred_statistics(micro_batch: int, way: dict[str, Any]) -> None:
    fragile, expected = Fragile(), nn.BatchNorm1d(3)
    layers = nn.Sequential(nn.BatchNorm1d(3), fragile, nn.BatchNorm1d(3))
    model = piped(layers, [1, 1, 1], 4, deferred_batch_norm=True, **way)
    fragile.left = micro_batch
    with pytest.raises(ArithmeticError, match="fragile"):
        model(torch.randn(8, 3) + 100)
    for norm in (model[0], model[2]):
        assert_close(norm.state_dict(), expected.state_dict(), rtol=0, atol=0)

    fragile.left = None
    good = torch.randn(8, 3)
    model(good)
    expected(good)
    assert_close(dict(model[0].named_buffers()), dict(expected.named_buffers()), **COMBINED)
