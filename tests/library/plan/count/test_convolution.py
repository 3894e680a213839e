"""Convolutions and their gradients: which operators they are, and what their Winograd form costs, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware.operators import Operator
from torchgpipe.plan.hardware.tiles import Grid

N, C, K, SIZE = 2, 8, 16, 6
TILES = N * 2 * 2
"""A 6 x 6 image has 2 x 2 tiles of 4 x 4, which cover 8 x 8."""


def counted(layer: nn.Module, *shape: int, needs: bool = True) -> tuple[list[Operator], list[Operator]]:
    x = torch.empty(shape, device="meta", requires_grad=needs)
    layer = layer.to("meta")
    with Counter() as forward:
        y = layer(x)
    with Counter() as backward:
        y.backward(torch.empty_like(y))
    return forward.operators, backward.operators


def winograd(operator: Operator) -> tuple[float, float]:
    """Return the floating-point operations and the bytes of the Winograd form."""
    return sum(x.flops for x in operator.other), sum(x.bytes for x in operator.other)


IMAGES, WEIGHTS = N * (C + K) * SIZE**2, C * K
WINOGRAD = (2 * 36 * WEIGHTS * TILES, 4 * (IMAGES + 9 * WEIGHTS + 2 * 36 * (TILES * (C + K) + WEIGHTS)))


def test_the_winograd_form() -> None:
    (forward,), (image, weight) = counted(nn.Conv2d(C, K, 3, padding=1, bias=False), N, C, SIZE, SIZE)
    grids = {
        "forward": (forward, Grid(K, N * SIZE**2), Grid(K, TILES, 36)),
        "image": (image, Grid(C, N * SIZE**2), Grid(C, TILES, 36)),
        "weight": (weight, Grid(K, 9 * C, divisible=True), Grid(K, C, 36, divisible=True)),
    }
    for operator, grid, tiled in grids.values():
        assert (operator.kind, operator.flops) == ("conv3x3", 2 * 9 * WEIGHTS * N * SIZE**2)
        assert operator.bytes == 4 * (IMAGES + 9 * WEIGHTS)
        assert {x.kind for x in operator.other} == {"winograd"}
        assert winograd(operator) == WINOGRAD
        assert (operator.grid, operator.other[-1].grid) == (grid, tiled)


@pytest.mark.parametrize("padding", [0, 2])
def test_tiles_are_of_what_is_computed(padding: int) -> None:
    """Without padding a 6 x 6 image has a result of 4 x 4, and with padding of 2 one of 8 x 8."""
    (operator,), (image, weight) = counted(nn.Conv2d(C, K, 3, padding=padding, bias=False), N, C, SIZE, SIZE)
    edge = SIZE - 2 + 2 * padding
    tiles = N * math.ceil(edge / 4) ** 2
    assert [x.other[-1].grid for x in (operator, image)] == [Grid(K, tiles, 36), Grid(C, TILES, 36)]
    assert winograd(weight)[0] == 2 * 36 * WEIGHTS * tiles


def test_large_images_multiply_4_times_less() -> None:
    ((operator,), _) = counted(nn.Conv2d(C, K, 3, padding=1, bias=False), N, C, 64, 64)
    assert operator.flops / winograd(operator)[0] == 4


# A convolution, what it is counted as, and whether it has tiles.
OPTIONS: list[tuple[Any, dict[str, Any], str, bool]] = [
    (nn.Conv2d, {"kernel_size": 3, "stride": 2}, "conv", True),
    (nn.Conv2d, {"kernel_size": 1}, "conv", True),
    (nn.Conv2d, {"kernel_size": 5}, "conv", True),
    (nn.Conv2d, {"kernel_size": 3, "dilation": 2}, "conv3x3", True),
    (nn.Conv2d, {"kernel_size": 3, "groups": 2}, "conv3x3", False),
    (nn.ConvTranspose2d, {"kernel_size": 3}, "conv3x3", False),
]


@pytest.mark.parametrize("layer, options, kind, tiled", OPTIONS)
def test_without_a_winograd_form(layer: Any, options: dict[str, Any], kind: str, tiled: bool) -> None:
    forward, backward = counted(layer(C, K, bias=False, **options), N, C, 16, 16)
    assert [x.kind for x in (*forward, *backward)] == [kind] * 3
    assert [x.other for x in (*forward, *backward)] == [()] * 3
    assert all((x.grid is not None) == tiled for x in (*forward, *backward))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize(("groups", "out"), [(1, K), (2, K), (C, C)])
def test_gradients_of_grouped_convolutions_are_as_much_work_as_their_forward(kind: Any, groups: int, out: int) -> None:
    (operator,), (image, weight) = counted(kind(C, out, 3, groups=groups, bias=False), N, C, 16, 16)
    positions = 14**2 if kind is nn.Conv2d else 16**2
    assert operator.flops == 2 * 9 * N * positions * C * out / groups
    assert image.flops == weight.flops == operator.flops


@pytest.mark.parametrize(
    ("bias", "needs", "kinds"),
    [
        (False, False, ["conv3x3"]),
        (False, True, ["conv3x3", "conv3x3"]),
        (True, True, ["conv3x3", "conv3x3", "elementwise"]),
    ],
)
def test_one_operator_for_each_gradient(bias: bool, needs: bool, kinds: list[str]) -> None:
    _, backward = counted(nn.Conv2d(C, K, 3, bias=bias), N, C, 16, 16, needs=needs)
    assert [x.kind for x in backward] == kinds
