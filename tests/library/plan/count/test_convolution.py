"""Convolutions and their gradients: which operators they are, and what their Winograd form costs, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.hardware.tiles import Grid

N, C, K = 2, 8, 16

# A convolution of images of a size, whether it has a Winograd form, and whether it is one product of matrices.
OPTIONS: list[tuple[Any, int, dict[str, Any], bool, bool]] = [
    (nn.Conv2d, 6, {"kernel_size": 3, "padding": 1}, True, True),
    (nn.Conv2d, 6, {"kernel_size": 3}, True, True),
    (nn.Conv2d, 6, {"kernel_size": 3, "padding": 2, "bias": True}, True, True),
    (nn.Conv2d, 64, {"kernel_size": 3, "padding": 1}, True, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "stride": 2}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 1}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 5}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "dilation": 2}, False, True),
    (nn.Conv2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
    (nn.Conv2d, 16, {"kernel_size": 3, "groups": C}, False, False),
    (nn.ConvTranspose2d, 16, {"kernel_size": 3}, False, False),
    (nn.ConvTranspose2d, 16, {"kernel_size": 3, "groups": 2}, False, False),
]


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("kind, size, options, winograd, plain", OPTIONS)
def test_convolutions(kind: Any, size: int, options: dict[str, Any], winograd: bool, plain: bool, needs: bool) -> None:
    """Each gradient is as much work as the forward: it multiplies as often, in a grid of its own."""
    layer = kind(C, K, **{"bias": False, **options}, device="meta")
    x = torch.empty(N, C, size, size, device="meta", requires_grad=needs)
    with Counter() as counter:
        y = layer(x)
        y.backward(torch.empty_like(y))
    side, out = options["kernel_size"], y.shape[-1]
    weights, groups = side**2 * C * K, options.get("groups", 1)
    grids = [Grid(K, N * out**2), Grid(C, N * size**2), Grid(K, side**2 * C, divisible=True)]
    tiles = [N * math.ceil(edge / 4) ** 2 for edge in (out, size, out)]
    tiled = [Grid(K, tiles[0], 36), Grid(C, tiles[1], 36), Grid(K, C, 36, divisible=True)]

    forward, *gradients = counter.operators
    bias = [gradients.pop()] if "bias" in options else []
    assert [(o.kind, o.flops, o.bytes) for o in bias] == [("elementwise", 0, 4 * N * K * out**2)] * len(bias)
    assert len(gradients) == 1 + needs
    positions = out**2 if kind is nn.Conv2d else size**2
    numbers = N * C * size**2 + N * K * out**2 + weights / groups
    for which, o in zip([0, 1, 2] if needs else [0, 2], (forward, *gradients), strict=True):
        assert o.kind == ("conv3x3" if side == 3 and "stride" not in options else "conv")
        assert o.flops == 2 * N * positions * weights / groups
        assert o.bytes == 4 * (numbers + (K if which == 0 and bias else 0))
        assert o.grid == (grids[which] if plain else None)
        assert [x.kind for x in o.other] == ["winograd"] * (2 * winograd)
        if winograd:
            transformed = 36 * (tiles[which] * (C + K) + C * K)
            assert [x.flops for x in o.other] == [0, 2 * 36 * C * K * tiles[which]]
            assert sum(x.bytes for x in o.other) == 4 * (numbers + 2 * transformed)
            assert o.other[-1].grid == tiled[which]
