"""Convolutions that others timed by themselves on cards with the P40's chip: what its fused Winograd kernels reach.

By the model fused kernels are the fastest way forward for one of these convolutions, that of 64 channels; its rates
decide. Everything else is only compared with what is predicted of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

import torch
from torch import nn

from reproduce.p40.cards import GTX_1080_TI, TITAN_X, TITAN_XP, Card
from reproduce.p40.efficiencies import LEAST, least, on_card
from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import WORK, Hardware
from torchgpipe.plan.operators import Operator

__all__ = ["FACES", "FIGURES", "SMALL", "SPEECH", "Figure", "Shape", "fused_share", "predicted"]


class Shape(NamedTuple):
    """A convolution's images (N, C, H, W), and its options."""

    images: tuple[int, int, int, int]
    filters: int
    kernel: tuple[int, int]
    stride: int
    padding: int

    def operators(self) -> tuple[Operator, list[Operator]]:
        """Count it: forward, and the gradients of the images and of the weight."""
        with torch.device("meta"):
            layer = nn.Conv2d(self.images[1], self.filters, self.kernel, self.stride, self.padding, bias=False)
            with Counter() as forward:
                result = layer(torch.empty(self.images, requires_grad=True))
            with Counter() as backward:
                result.backward(torch.empty_like(result))
        return forward.operators[0], backward.operators


class Figure(NamedTuple):
    """What a version of DeepBench's README says of a convolution in float32, on the fastest card that it knew."""

    shape: Shape
    card: Card
    rate: float
    """Operations per second forward, by the formula, whichever way it was computed."""
    total: float
    """Seconds of forward and of both gradients."""

    @property
    def seconds(self) -> float:
        """Seconds forward."""
        return self.shape.operators()[0].flops / self.rate


# There it is W, H, C, N, and R, S, the kernel's height and width: the next layer, among inference, has W = 341, H = 79.
SPEECH = Shape((32, 1, 161, 700), 32, (5, 20), 2, 0)
FACES = Shape((8, 64, 54, 54), 64, (3, 3), 1, 1)
FIRST = Shape((16, 3, 224, 224), 64, (3, 3), 1, 1)
SMALL = Shape((16, 512, 7, 7), 512, (3, 3), 1, 1)
LARGE_KERNEL = Shape((16, 192, 28, 28), 32, (5, 5), 1, 2)

FIGURES = (
    # baidu-research/DeepBench, README at commit 86e6e14b
    Figure(SPEECH, TITAN_X, 6.63e12, 2.98e-3),
    Figure(FACES, TITAN_X, 10.55e12, 0.63e-3),
    Figure(FIRST, TITAN_X, 3.60e12, 3.99e-3),
    Figure(SMALL, TITAN_X, 5.88e12, 2.93e-3),
    Figure(LARGE_KERNEL, TITAN_X, 6.59e12, 1.57e-3),
    # the same at commit 106e5236
    Figure(SPEECH, TITAN_XP, 6.74e12, 2.64e-3),
    Figure(FACES, TITAN_XP, 10.68e12, 0.64e-3),
    Figure(SMALL, GTX_1080_TI, 7.68e12, 1.37e-3),
    Figure(LARGE_KERNEL, TITAN_X, 6.45e12, 1.57e-3),
)


def fused_share(node: Hardware) -> float:
    """Return the efficiency of fused kernels with which the convolution that takes them is best on both cards."""
    figures = [figure for figure in FIGURES if figure.shape == FACES]

    def residuals(x: Sequence[float]) -> list[float]:
        only = replace(node, compute_efficiency={**dict.fromkeys(WORK, LEAST), "winograd_fused": x[0]})
        return [log(predicted(figure, only)[0] / figure.seconds) for figure in figures]

    return least(residuals, [1.0])[0]


def predicted(figure: Figure, node: Hardware) -> tuple[float, float]:
    """Return the seconds of the figure's convolution on its card with the node's efficiencies: forward, and in all."""
    forward, backward = figure.shape.operators()
    card = on_card(node, figure.card, node.memory_efficiency["matmul"])
    return card.seconds(forward), card.seconds(forward) + card.total(backward)
