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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.plan.hardware._flops import flops_of
from torchgpipe.plan.hardware.operators import Operator, OperatorClass, bytes_of, dtype_of
from torchgpipe.plan.hardware.tiles import Grid


def convolution(func: Any, args: Sequence[Any], result: Tensor) -> list[Operator]:
    """Return what `aten.convolution` does."""
    image, weight, bias, stride, _, dilation, transposed, _, groups = args
    known = Convolution(image, weight, result, stride, dilation, transposed, groups)
    tensors = [x for x in (image, weight, bias, result) if x is not None]
    return [known.operator(flops_of(func, args, {}, result), tensors, Grid(weight.shape[0], _pixels(result)), result)]


def convolution_backward(func: Any, args: Sequence[Any], results: Sequence[Tensor | None]) -> list[Operator]:
    """Return what `aten.convolution_backward` does: one operator for each gradient that is asked for."""
    result, image, weight, _, stride, _, dilation, transposed, _, groups, _ = args
    known = Convolution(image, weight, result, stride, dilation, transposed, groups)
    operators = []
    for i, gradient in enumerate(results):
        if gradient is None:
            continue
        if i == 2:
            operators.append(Operator("elementwise", dtype_of(result), 0.0, float(bytes_of(result))))
            continue
        flops = flops_of(func, (*args[:-1], [i == j for j in range(3)]), {}, results)
        grid = Grid(weight.shape[1], _pixels(image))
        if i == 1:
            flops /= groups  # which the formula leaves out for the weight alone
            grid = Grid(weight.shape[0], weight[0].numel(), divisible=True)
        tiled = image if i == 0 else result
        operators.append(known.operator(flops, (result, (weight, image)[i], gradient), grid, tiled))
    return operators


class Convolution(NamedTuple):
    """The tensors and options of a convolution, whichever of the three is to be computed from the others."""

    image: Tensor
    weight: Tensor
    result: Tensor
    stride: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int

    def operator(self, flops: float, tensors: Sequence[Tensor], grid: Grid, tiled: Tensor) -> Operator:
        """Return the operator that computes one of the three, as matrices of `grid`, from and to `tensors`.

        Winograd kernels cut `tiled` into tiles: what is computed, or of a weight's gradient the result's.
        """
        small = tuple(self.weight.shape[2:]) == (3, 3) and all(s == 1 for s in self.stride)
        plain = self.groups == 1 and not self.transposed
        winograd = self._winograd(grid, tiled) if small and plain and all(d == 1 for d in self.dilation) else ()
        moved = float(sum(map(bytes_of, tensors)))
        kind: OperatorClass = "conv3x3" if small else "conv"
        return Operator(kind, self._dtype(), flops, moved, winograd, grid if plain else None)

    def _dtype(self) -> str:
        """Return the type that it computes in: TF32 in place of float32 where PyTorch is set so, as by default."""
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        dtype = dtype_of(self.weight)
        return "tf32" if dtype == "float32" and precision == "tf32" else dtype

    def _winograd(self, grid: Grid, tiled: Tensor) -> tuple[Operator, ...]:
        """Return F(4 x 4, 3 x 3): transforms of what comes in and of the result, and a product for each of 36 values.

        Which of the three is computed changes what is tiled, and the shape of the products.
        """
        weights = self.weight.shape[0] * self.weight.shape[1]
        samples, _, *sizes = tiled.shape
        tiles = float(samples) * math.prod(math.ceil(size / 4) for size in sizes)
        plain = sum(map(bytes_of, (self.image, self.weight, self.result)))
        transformed = 36.0 * (tiles * sum(self.weight.shape[:2]) + weights) * self.weight.element_size()
        products = Grid(grid.rows, self.weight.shape[1] if grid.divisible else tiles, 36, grid.divisible)
        dtype = dtype_of(self.weight)
        return (
            Operator("winograd", dtype, 0.0, plain + transformed),
            Operator("winograd", dtype, 2.0 * 36 * weights * tiles, transformed, (), products),
        )


def _pixels(image: Tensor) -> float:
    return float(image.shape[0] * math.prod(image.shape[2:]))
