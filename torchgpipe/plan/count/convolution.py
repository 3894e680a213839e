"""Count what convolutions do, as matrix products and as Winograd kernels.

A 3 x 3 convolution at stride 1 need not multiply as often as its formula says. Winograd's
F(m x m, 3 x 3) gets a tile of m x m results from (m + 2) x (m + 2) values, with one multiplication
for each of these values instead of nine for each result (Lavin and Gray, Fast Algorithms for
Convolutional Neural Networks, arXiv:1509.09308). Images are padded to whole tiles. Images and
weights are transformed, which moves bytes. So Winograd does not pay if there are few tiles for each
weight.

The count is for m = 4 and for kernels that write transformed images to memory, as cuDNN's unfused
kernels do. Its fused kernels, which keep transformed images on the chip, are left out: predictions
agree as well with published timings without them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.plan.hardware.operators import Grid, Operator, OperatorClass, bytes_of, dtype_of

VALUES = 36
"""The values of a transformed tile, (m + 2) x (m + 2) for m = 4."""


def convolution(args: Sequence[Any], made: Sequence[Any]) -> list[Operator]:
    """Return what `aten.convolution` or `aten.convolution_backward` does.

    A backward is one operator for each gradient that is asked for. The gradients of the image and
    of the weight take as many operations as the result of the forward.

    Args:
        args: The operator's arguments.
        made: What it returned: the result, or the gradients of the image, the weight and the bias.
    """
    backward = len(made) == 3
    image, weight, bias, stride, _, dilation, transposed, _, groups = (
        args[-10:-1] if backward else args
    )
    result = args[0] if backward else made[0]
    small = tuple(weight.shape[2:]) == (3, 3) and all(step == 1 for step in stride)
    plain = groups == 1 and not transposed
    has_winograd = small and plain and all(step == 1 for step in dilation)
    kind: OperatorClass = "conv3x3" if small else "conv"
    dtype = dtype_of(weight)
    if dtype == "float32":
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        if precision == "tf32":  # as is PyTorch's default
            dtype = "tf32"
    flops = 2.0 * weight.numel() * _pixels(image if transposed else result)
    moved = float(sum(map(bytes_of, (image, weight, result))))

    def operator(grid: Grid, tiled: Tensor, more: float = 0.0) -> Operator:
        """Return the operator that computes matrices of `grid`, and moves `more` bytes.

        `tiled` is what Winograd kernels cut into tiles: the output, or for the weight's gradient
        the result of the forward.
        """
        other = _winograd(weight, tiled, grid, moved) if has_winograd else ()
        return Operator(kind, dtype, flops, moved + more, other, grid if plain else None)

    if not backward:
        grid = Grid(weight.shape[0], _pixels(result))
        return [operator(grid, result, 0.0 if bias is None else bytes_of(bias))]
    image_grad, weight_grad, bias_grad = made
    found = []
    if image_grad is not None:
        grid = Grid(weight.shape[1], _pixels(image))
        found.append(operator(grid, image))
    if weight_grad is not None:
        grid = Grid(weight.shape[0], math.prod(weight.shape[1:]), divisible=True)
        found.append(operator(grid, result))
    if bias_grad is not None:
        read = float(bytes_of(result))
        found.append(Operator("elementwise", dtype_of(result), 0.0, read))
    return found


def _winograd(weight: Tensor, tiled: Tensor, grid: Grid, moved: float) -> tuple[Operator, ...]:
    """Return the Winograd kernels: transforms of tiles and weights, and matrix products.

    There is one product for each value of a tile. Its shape depends on what is computed.
    """
    dtype = dtype_of(weight)
    outputs, inputs = weight.shape[:2]
    tiles = float(len(tiled))
    for size in tiled.shape[2:]:
        tiles *= math.ceil(size / 4)
    weights = outputs * inputs
    transformed = VALUES * (tiles * (outputs + inputs) + weights) * weight.element_size()
    columns = inputs if grid.divisible else tiles
    products = Grid(grid.rows, columns, VALUES, grid.divisible)
    flops = 2.0 * VALUES * weights * tiles
    return (
        Operator("winograd", dtype, 0.0, moved + transformed),
        Operator("winograd", dtype, flops, transformed, (), products),
    )


def _pixels(image: Tensor) -> float:
    """Return how many pixels a batch of images has."""
    return float(image.shape[0] * math.prod(image.shape[2:]))
