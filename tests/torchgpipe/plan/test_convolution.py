"""Convolutions and their gradients: which operators they are, and what their Winograd forms cost, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan.counter import Counter
from torchgpipe.plan.operators import Operator
from torchgpipe.plan.tiles import Grid

N, C, K, SIZE = 2, 8, 16, 6
TILES2, TILES4 = N * 3 * 3, N * 2 * 2
"""A 6 x 6 image has 3 x 3 tiles of 2 x 2, and 2 x 2 of 4 x 4, which cover 8 x 8."""


def counted(layer: nn.Module, *shape: int, needs: bool = True) -> tuple[list[Operator], list[Operator]]:
    x = torch.empty(shape, device="meta", requires_grad=needs)
    layer = layer.to("meta")
    with Counter() as forward:
        y = layer(x)
    with Counter() as backward:
        y.backward(torch.empty_like(y))
    return forward.operators, backward.operators


def ways(operator: Operator) -> list[tuple[float, float]]:
    """Return the floating-point operations and the bytes of each Winograd form, the smaller tiles last."""
    return [(sum(x.flops for x in way), sum(x.bytes for x in way)) for way in operator.others]


IMAGES, WEIGHTS = N * (C + K) * SIZE**2, C * K
FUSED = (2 * 16 * WEIGHTS * TILES2, 4 * (IMAGES + (9 + 16 + 16) * WEIGHTS))
UNFUSED = (2 * 36 * WEIGHTS * TILES4, 4 * (IMAGES + 9 * WEIGHTS + 2 * 36 * (TILES4 * (C + K) + WEIGHTS)))


def test_winograd_forms() -> None:
    forward, backward = counted(nn.Conv2d(C, K, 3, padding=1, bias=False), N, C, SIZE, SIZE)
    (image, weight) = backward
    flops = 2 * 9 * WEIGHTS * N * SIZE**2
    assert [x.flops for x in (*forward, image, weight)] == [flops] * 3
    assert {x.kind for x in (*forward, image, weight)} == {"conv3x3"}
    assert ways(forward[0]) == ways(image) == [UNFUSED, FUSED]
    assert ways(weight) == [UNFUSED]
    assert [{x.kind for x in way} for way in image.others] == [{"winograd"}, {"winograd_fused"}]
    assert all(x.bytes == 4 * (IMAGES + 9 * WEIGHTS) for x in (*forward, image, weight))


def test_what_they_put_out() -> None:
    forward, (image, weight) = counted(nn.Conv2d(C, K, 3, padding=1, bias=False), N, C, SIZE, SIZE)
    assert forward[0].grid == Grid(K, N * SIZE**2)
    assert image.grid == Grid(C, N * SIZE**2)
    assert weight.grid == Grid(K, 9 * C, divisible=True)
    assert [way[-1].grid for way in forward[0].others] == [Grid(K, TILES4, 36), Grid(K, 4 * TILES2)]
    assert [way[-1].grid for way in image.others] == [Grid(C, TILES4, 36), Grid(C, 4 * TILES2)]
    assert [way[-1].grid for way in weight.others] == [Grid(K, C, 36, divisible=True)]


@pytest.mark.parametrize("padding", [0, 2])
def test_tiles_are_of_what_is_computed(padding: int) -> None:
    """Without padding a 6 x 6 image has a result of 4 x 4, and with padding of 2 one of 8 x 8."""
    (operator,), (image, weight) = counted(nn.Conv2d(C, K, 3, padding=padding, bias=False), N, C, SIZE, SIZE)
    edge = SIZE - 2 + 2 * padding
    tiles = {4: N * math.ceil(edge / 4) ** 2, 2: N * math.ceil(edge / 2) ** 2}
    assert [way[-1].grid for way in operator.others] == [Grid(K, tiles[4], 36), Grid(K, 4 * tiles[2])]
    assert [way[-1].grid for way in image.others] == [Grid(C, TILES4, 36), Grid(C, 4 * TILES2)]
    assert ways(image)[1][0] == 2 * 16 * WEIGHTS * TILES2
    assert ways(weight)[0][0] == 2 * 36 * WEIGHTS * tiles[4]


def test_large_images_of_many_channels_multiply_4_and_2_25_times_less() -> None:
    ((operator,), _) = counted(nn.Conv2d(C, K, 3, padding=1, bias=False), N, C, 64, 64)
    assert [operator.flops / flops for flops, _ in ways(operator)] == [4, 2.25]


OPTIONS: list[tuple[dict[str, Any], str, bool]] = [
    ({"kernel_size": 3, "stride": 2}, "conv", True),
    ({"kernel_size": 1}, "conv", True),
    ({"kernel_size": 5}, "conv", True),
    ({"kernel_size": 3, "dilation": 2}, "conv3x3", True),
    ({"kernel_size": 3, "groups": 2}, "conv3x3", False),
]


@pytest.mark.parametrize(("options", "kind", "tiled"), OPTIONS)
def test_without_winograd_forms(options: dict[str, Any], kind: str, tiled: bool) -> None:
    forward, backward = counted(nn.Conv2d(C, K, bias=False, **options), N, C, 16, 16)
    assert [x.kind for x in (*forward, *backward)] == [kind] * 3
    assert [x.others for x in (*forward, *backward)] == [()] * 3
    assert all((x.grid is not None) == tiled for x in (*forward, *backward))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize(("groups", "out"), [(1, K), (2, K), (C, C)])
def test_gradients_of_grouped_convolutions_are_as_much_work_as_their_forward(kind: Any, groups: int, out: int) -> None:
    (operator,), (image, weight) = counted(kind(C, out, 3, groups=groups, bias=False), N, C, 16, 16)
    positions = 14**2 if kind is nn.Conv2d else 16**2
    assert operator.flops == 2 * 9 * N * positions * C * out / groups
    assert image.flops == weight.flops == operator.flops


def test_transposed() -> None:
    forward, backward = counted(nn.ConvTranspose2d(C, K, 3, bias=False), N, C, 16, 16)
    assert [(x.others, x.grid) for x in (*forward, *backward)] == [((), None)] * 3


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
