"""Count a convolution's operations and bytes: as a matrix product, and as a Winograd kernel.

A Winograd kernel computes a 3 x 3 convolution at stride 1 with fewer multiplications than a matrix
product. It cuts the image into tiles, and computes m x m results for a tile from (m + 2) x (m + 2)
values, with one multiplication for each of these values. A matrix product needs nine
multiplications for each result (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks,
arXiv:1509.09308). But a Winograd kernel first has to transform the image and the weights, which
moves bytes, and it pads images to whole tiles. If there are few tiles for each weight, this costs
more time than the saved multiplications.

The count is for m = 4, and for kernels that write transformed images to memory, like cuDNN's
unfused kernels. cuDNN also has fused kernels, which keep transformed images on the chip. The fused
kernels are not counted, because predictions agree with published timings equally well without them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.plan.hardware.operators import Grid, Operator, OperatorClass, bytes_of, dtype_of

VALUES = 36
"""The number of values in a transformed tile, (m + 2) x (m + 2) for m = 4."""


def convolution(args: Sequence[Any], made: Sequence[Any]) -> list[Operator]:
    """Describe a convolution that ran, forward or backward, as a list of `Operator` objects.

    A backward counts as one operator for each gradient that it computes. The gradient of the image
    and the gradient of the weight each take as many operations as the forward.

    Args:
        args: The arguments of `aten.convolution` or `aten.convolution_backward`.
        made: What the operator returned: the result, or the gradients of image, weight and bias.
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
        if precision == "tf32":
            dtype = "tf32"
    flops = 2.0 * weight.numel() * _pixels(image if transposed else result)
    moved = float(sum(map(bytes_of, (image, weight, result))))

    def operator(grid: Grid, tiled: Tensor, more: float = 0.0) -> Operator:
        """Describe the operator of the convolution that computes the matrices of `grid`.

        Args:
            grid: How many matrices the operator computes, and their size.
            tiled: The tensor that Winograd kernels cut into tiles: the operator's output. For the
                gradient of the weight, it is the forward's output.
            more: The bytes that the operator moves in addition to image, weight and result.
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
    """Describe a convolution by Winograd kernels as two operators.

    The first operator transforms the image's tiles and the weights. A transformed tile has 36
    values. The second operator computes a matrix product for each of them.
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
    """Return how many pixels a batch has."""
    return float(image.shape[0] * math.prod(image.shape[2:]))
