"""Count what convolutions do: as matrix products, and as Winograd kernels where there are any.

A 3 x 3 convolution at stride 1 need not multiply as often as its formula says. Winograd's F(m x m, 3 x 3) gets a tile
of m x m results from (m + 2) x (m + 2) values, with one multiplication for each of those instead of nine for each
result (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, arXiv:1509.09308). Images are padded to
whole tiles, and images and weights are transformed, which costs traffic: with few tiles to a weight it does not pay.
The count is for m = 4, with transformed images written to memory, as cuDNN's unfused kernels do. Its fused kernels
keep them on the chip; they are left out, as published timings are described as well without them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.plan.hardware.operators import Grid, Operator, OperatorClass, bytes_of, dtype_of


def convolution(args: Sequence[Any], made: Sequence[Any]) -> list[Operator]:
    """Return what `aten.convolution` does, which has made a result, or `aten.convolution_backward`: three gradients.

    Backward is one operator for each gradient that is asked for. Those of image and weight take as many operations as
    the result.
    """
    image, weight, bias, stride, _, dilation, transposed, _, groups = (
        args[-10:-1] if len(made) == 3 else args
    )
    result = args[0] if len(made) == 3 else made[0]
    small = tuple(weight.shape[2:]) == (3, 3) and all(s == 1 for s in stride)
    plain = groups == 1 and not transposed
    kind: OperatorClass = "conv3x3" if small else "conv"
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    dtype = dtype_of(weight)
    rate = (
        "tf32" if dtype == "float32" and precision == "tf32" else dtype
    )  # as PyTorch is set, by default in TF32
    flops = 2.0 * weight.numel() * _pixels(image if transposed else result)
    moved = float(sum(map(bytes_of, (image, weight, result))))

    def operator(grid: Grid, tiled: Tensor, more: float = 0.0) -> Operator:
        """Return what computes one of the three, as matrices of `grid`, with `more` bytes.

        Winograd kernels cut `tiled` into tiles: what is computed, or of a weight's gradient the result's. They are
        transforms of what comes in and of the result, and a product for each of 36 values, whose shape depends on which
        of the three is computed.
        """
        other: tuple[Operator, ...] = ()
        if small and plain and all(d == 1 for d in dilation):
            weights = weight.shape[0] * weight.shape[1]
            tiles = float(len(tiled)) * math.prod(math.ceil(size / 4) for size in tiled.shape[2:])
            transformed = 36.0 * (tiles * sum(weight.shape[:2]) + weights) * weight.element_size()
            products = Grid(
                grid.rows, weight.shape[1] if grid.divisible else tiles, 36, grid.divisible
            )
            other = (
                Operator("winograd", dtype, 0.0, moved + transformed),
                Operator("winograd", dtype, 2.0 * 36 * weights * tiles, transformed, (), products),
            )
        return Operator(kind, rate, flops, moved + more, other, grid if plain else None)

    if len(made) == 1:
        return [
            operator(
                Grid(weight.shape[0], _pixels(result)),
                result,
                0.0 if bias is None else bytes_of(bias),
            )
        ]
    ways = (
        (Grid(weight.shape[1], _pixels(image)), image),
        (Grid(weight.shape[0], weight[0].numel(), divisible=True), result),
    )
    found = [
        operator(*way) for way, gradient in zip(ways, made, strict=False) if gradient is not None
    ]
    added = Operator("elementwise", dtype_of(result), 0.0, float(bytes_of(result)))
    return found if made[2] is None else [*found, added]


def _pixels(image: Tensor) -> float:
    return float(image.shape[0] * math.prod(image.shape[2:]))
