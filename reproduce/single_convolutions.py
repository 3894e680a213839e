"""Convolutions that others timed by themselves on cards with the P40's chip: what its fused Winograd kernels reach.

Whole models do not tell that from what the other kernels reach, for in each there are both. Of these convolutions the
fused kernels are the fastest way for one; its figures decide, and the others are shown beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

import torch
from torch import nn

from reproduce.efficiencies import LEAST, least, on_card
from reproduce.timings import GTX_1080_TI, TITAN_X, TITAN_XP, Card
from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import WORK, Hardware
from torchgpipe.plan.operators import Operator

__all__ = ["FIGURES", "Figure", "fused_share", "predicted_rate"]


class Shape(NamedTuple):
    """A convolution's images (N, C, H, W), and its options."""

    images: tuple[int, int, int, int]
    filters: int
    kernel: tuple[int, int]
    stride: int
    padding: int

    def operator(self) -> Operator:
        """Count it, forward."""
        with torch.device("meta"):
            layer = nn.Conv2d(self.images[1], self.filters, self.kernel, self.stride, self.padding, bias=False)
            with Counter() as counter:
                layer(torch.empty(self.images))
        operator: Operator = counter.operators[0]
        return operator


class Figure(NamedTuple):
    """What a version of DeepBench's README says of forward in float32: the fastest card of those that it knew."""

    shape: Shape
    card: Card
    rate: float
    """Operations per second, by the formula, whichever way it was computed."""


# As the columns there go, but for width before height: W, H, C, N; R, S; filters.
SPEECH = Shape((32, 1, 161, 700), 32, (20, 5), 2, 0)
FACES = Shape((8, 64, 54, 54), 64, (3, 3), 1, 1)
FIRST = Shape((16, 3, 224, 224), 64, (3, 3), 1, 1)
SMALL = Shape((16, 512, 7, 7), 512, (3, 3), 1, 1)
LARGE_KERNEL = Shape((16, 192, 28, 28), 32, (5, 5), 1, 2)

FIGURES = (
    # baidu-research/DeepBench, README at commit 86e6e14b
    Figure(SPEECH, TITAN_X, 6.63e12),
    Figure(FACES, TITAN_X, 10.55e12),
    Figure(FIRST, TITAN_X, 3.60e12),
    Figure(SMALL, TITAN_X, 5.88e12),
    Figure(LARGE_KERNEL, TITAN_X, 6.59e12),
    # the same at commit 106e5236
    Figure(SPEECH, TITAN_XP, 6.74e12),
    Figure(FACES, TITAN_XP, 10.68e12),
    Figure(SMALL, GTX_1080_TI, 7.68e12),
    Figure(LARGE_KERNEL, TITAN_X, 6.45e12),
)


def fused_share(node: Hardware) -> float:
    """Return the efficiency of fused kernels with which the convolution that takes them is best on both cards."""
    figures = [figure for figure in FIGURES if figure.shape == FACES]

    def residuals(x: Sequence[float]) -> list[float]:
        only = replace(node, compute_efficiency={**dict.fromkeys(WORK, LEAST), "winograd_fused": x[0]})
        return [log(figure.rate / predicted_rate(figure, only)) for figure in figures]

    return least(residuals, [1.0])[0]


def predicted_rate(figure: Figure, node: Hardware) -> float:
    """Return the operations per second of the figure's convolution, on its card with the node's efficiencies."""
    operator = figure.shape.operator()
    card = on_card(node, figure.card, node.memory_efficiency["matmul"])
    return operator.flops / card.seconds(operator)
