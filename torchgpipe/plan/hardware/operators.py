"""Describe operators for predictions: their class, floating-point operations and bytes.

An operator is a call that reaches PyTorch's dispatcher below autograd, such as `aten.mm`. On a GPU,
an operator launches about one kernel.

A GPU kernel for a matrix product cuts the output matrix into tiles of a fixed size. The GPU's
processors compute the tiles in rounds, and each processor computes one tile in a round. Time is
wasted in two ways: a tile that reaches over the edge of the matrix takes as long as a full tile,
and in the last round some processors have no tile.

Floating-point operations are counted by a table of formulas in PyTorch. PyTorch does not promise to
keep this table, so only this module uses it. `tests/library/plan/count/test_counter.py` fails if
the table moves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

OperatorClass = Literal[
    "matmul",
    "conv",
    "conv3x3",
    "winograd",
    "attention",
    "attention_backward",
    "norm",
    "pool",
    "elementwise",
]
"""The classes of operators. A hardware description has efficiencies for each class.

- `conv3x3` are 3 x 3 convolutions at stride 1, computed by kernels as for other convolutions.
- `winograd` are 3 x 3 convolutions at stride 1, computed by Winograd kernels (see `convolution`).
- `attention` and `attention_backward` are fused attention kernels (see `attention`).
- `elementwise` are all operators that are in no other class.
"""
CLASSES: tuple[str, ...] = get_args(OperatorClass)

TILES = ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128))
"""The sizes of tiles, in rows and columns.

The names of cuDNN's and cuBLAS's float32 kernels have these sizes, such as `..._128x64_...`.
"""


class Grid(NamedTuple):
    """The results of an operator's matrix products: `matrices` matrices of `rows` by `columns`."""

    rows: float
    columns: float
    matrices: int = 1
    divisible: bool = False
    """Whether processors can share a tile, so that all of them have work in the last round."""


class Operator(NamedTuple):
    """A call of an operator (such as a matrix product) for a micro-batch, and what it costs."""

    kind: OperatorClass
    dtype: str
    """The dtype in which the operator computes, such as "float32"."""
    flops: float
    """The number of floating-point operations."""
    bytes: float
    """The bytes that the operator reads and writes."""
    other: tuple[Operator, ...] = ()
    """Alternative kernels that compute the same result. A library uses the faster ones."""
    grid: Grid | None = None
    """The matrices that the operator computes; `None` if tiles do not matter for it."""


def bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements. An expanded dimension counts as one element."""
    if x.layout is not torch.strided:
        return 0  # a sparse tensor has no strides; its parts are counted as tensors of their own
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride:
            elements *= size
    return elements * x.element_size()


def dtype_of(x: Tensor) -> str:
    """Return the name of a tensor's dtype as text without `torch.`, such as "float32"."""
    return str(x.dtype).removeprefix("torch.")


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return how many floating-point operations an operator did when it ran.

    Args:
        operator: The operator.
        args: The positional arguments of the operator.
        kwargs: The keyword arguments of the operator.
        result: What the operator returned.

    Returns:
        The number that PyTorch's formula gives, or 0 if there is no formula.
    """
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=result))


@functools.lru_cache(maxsize=1 << 16)
def excess(grid: Grid, processors: int) -> float:
    """Return by what factor tiles make a matrix product slower; 1 means that no time is wasted.

    A kernel cuts the result into tiles. Time is wasted on the tiles at the edges and in the last
    round (see the docstring of this module). The factor is for the best of the tile sizes in
    `TILES`.

    Args:
        grid: The matrices that the product computes.
        processors: How many processors the device has.
    """
    elements = grid.matrices * grid.rows * grid.columns
    least = math.inf
    for rows, columns in TILES:
        tiles = grid.matrices * math.ceil(grid.rows / rows) * math.ceil(grid.columns / columns)
        if not grid.divisible:
            rounds = math.ceil(tiles / processors)
            tiles = rounds * processors
        least = min(least, tiles * rows * columns / elements)
    return least
