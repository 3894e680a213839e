"""Normalization: running statistics see every micro-batch once, or every mini-batch once where they are deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ..parts import Fails
from ..plain import piped
from .compare import assert_same_outcome, assert_transparent, both, observe


def channels(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


# Layers on inputs of shape (N, 2, 3, 3).
NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": lambda: channels(nn.BatchNorm2d(4)),
    "momentum none": lambda: channels(nn.BatchNorm2d(4, momentum=None)),
    "no running statistics": lambda: channels(nn.BatchNorm2d(4, track_running_stats=False)),
    "in evaluation by itself": lambda: channels(nn.BatchNorm2d(4).eval()),
    "instance norm": lambda: channels(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4)),
    "at the start": lambda: nn.Sequential(nn.BatchNorm2d(2), *channels(nn.Tanh())[:4]),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 3]], ids=lambda b: f"n{len(b)}")
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: str, balance: list[int], training: bool, way: dict[str, Any]) -> None:
    module = NORMS[norm]() if training else NORMS[norm]().eval()
    outcome = assert_transparent(module, torch.randn(14, 2, 3, 3).requires_grad_(), balance, chunks=4, steps=2, **way)
    if norm == "batch norm":
        assert outcome.buffers["1.num_batches_tracked"] == (2 * 4 if training else 0)


def assert_same_statistics(ours: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    # Moments of parts are combined, which adds in another order than those of the whole.
    assert_close(ours, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch, chunks", [(13, 8), (12, 4), (12, 1), (13, 20), (7, 2)])
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1]], ids=str)
def test_deferred_statistics_are_those_of_the_mini_batch_and_all_else_as_before(
    balance: list[int], batch: int, chunks: int, way: dict[str, Any]
) -> None:
    module, whole = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm2d(4)
    plain, model = both(module, balance, chunks, deferred_batch_norm=True, **way)
    for step in range(1, 4):
        x = (torch.randn(batch, 2, 3, 3) * step + 5).requires_grad_()
        ours, expected = observe(model, x), observe(plain, x)
        with torch.no_grad():
            whole(plain[0](x))
        assert whole.num_batches_tracked == step
        assert_same_statistics(ours.buffers, {f"1.{name}": b for name, b in whole.named_buffers()})
        expected.buffers = ours.buffers
        assert_same_outcome(ours, expected)


@pytest.mark.parametrize("micro_batch", range(4))
def test_a_failing_forward_leaves_no_deferred_statistics(micro_batch: int, way: dict[str, Any]) -> None:
    fails, expected = Fails(), nn.BatchNorm1d(3)
    layers = nn.Sequential(nn.BatchNorm1d(3), fails, nn.BatchNorm1d(3))
    model = piped(layers, [1, 1, 1], 4, deferred_batch_norm=True, **way)
    fails.fail("forward", ArithmeticError("trouble"), calls_before=micro_batch)
    with pytest.raises(ArithmeticError, match="trouble"):
        model(torch.randn(8, 3) + 100)
    for norm in (model[0], model[2]):
        assert_close(norm.state_dict(), expected.state_dict(), rtol=0, atol=0)

    good = torch.randn(8, 3)
    model(good)
    expected(good)
    assert_same_statistics(dict(model[0].named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_statistics_are_there_again_after_a_failing_recomputation(way: dict[str, Any]) -> None:
    norm, fails = nn.BatchNorm2d(4), Fails()
    fails.fail("recompute", ArithmeticError("trouble"))
    y = piped(nn.Sequential(nn.Conv2d(2, 4, 1), norm, fails), [1, 2], 4, **way)(torch.randn(14, 2, 3, 3))
    expected = {name: b.clone() for name, b in norm.named_buffers()}
    with pytest.raises(ArithmeticError, match="trouble"):
        y.sum().backward()
    assert norm.track_running_stats
    assert_close(dict(norm.named_buffers()), expected, rtol=0, atol=0)
