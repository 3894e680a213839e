"""Effort: what operators cost, by count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.effort import ELEMENTS_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_OPERATOR, Effort
from torchgpipe.randomness import PrivateGenerator

x = torch.ones(2, 3, 8, 8)
a, b = torch.ones(4, 5), torch.ones(5, 6)
kernel = torch.ones(7, 3, 3, 3)

# What runs: how many operators, how many elements in and out, how many operations beside (2 for a multiply-add).
CASES: dict[str, tuple[Callable[[], Tensor], int, int, int]] = {
    "elementwise": (lambda: x.exp(), 1, 2 * x.numel(), 0),
    "two of them": (lambda: x.exp().sin(), 2, 4 * x.numel(), 0),
    "two inputs": (lambda: x + x, 1, 3 * x.numel(), 0),
    "a list of inputs": (lambda: torch.cat([a, a]), 1, 4 * a.numel(), 0),
    "a view, which moves nothing": (lambda: a.t(), 1, 0, 0),
    "a matrix product": (lambda: a @ b, 1, 20 + 30 + 24, 2 * 4 * 5 * 6),
    "a convolution": (
        lambda: F.conv2d(x, kernel, padding=1),
        1,
        x.numel() + kernel.numel() + 2 * 7 * 64,
        2 * (2 * 7 * 64) * (3 * 9),
    ),
}


@pytest.mark.parametrize("run, operators, elements, flops", CASES.values(), ids=CASES)
def test_counted(run: Callable[[], Tensor], operators: int, elements: int, flops: int) -> None:
    effort = Effort()
    with PrivateGenerator(0, lambda: None, effort):
        run()
    fixed = operators * SECONDS_PER_OPERATOR
    proportional = elements / ELEMENTS_PER_SECOND + flops / FLOPS_PER_SECOND
    assert (effort.fixed, effort.proportional) == pytest.approx((fixed, proportional))
    for growth in (0.5, 1, 3):
        assert effort.seconds(growth) == pytest.approx(fixed + growth * proportional)


def test_counting_changes_no_result() -> None:
    layer = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    with PrivateGenerator(0, lambda: None, Effort()):
        counted = layer(a)
    assert torch.equal(counted, layer(a))
