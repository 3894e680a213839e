"""Describe operators for predictions: their class, floating-point operations and bytes.

An operator is what reaches PyTorch's dispatcher below autograd. On a GPU it is about one kernel.
Libraries cut the output of a matrix product into tiles of fixed sizes, and one processor computes a
tile. A tile that reaches over the edge of the matrix takes as long as a full tile. So does the last
round of tiles, in which some processors have no tile.

Only this module uses PyTorch's table of formulas for floating-point operations, which PyTorch does
not promise to keep. `tests/library/plan/count/test_counter.py` fails if the table moves.
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
"""The classes of operators, which have efficiencies of their own.

- `conv3x3` are convolutions for which libraries have Winograd kernels (3 x 3 at stride 1), computed
  like any other convolution.
- `winograd` are the same convolutions, computed by these kernels (see `convolution`).
- `attention` and `attention_backward` are fused kernels (see `attention`).
- `elementwise` are all operators without another class; they read and write memory.
"""
CLASSES: tuple[str, ...] = get_args(OperatorClass)

TILES = ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128))
"""The sizes of tiles to choose from, in rows and columns.

They are the sizes in the names of cuDNN's and cuBLAS's float32 kernels, such as `..._128x64_...`.
"""


class Grid(NamedTuple):
    """What an operator's matrix products put out: `matrices` matrices of `rows` by `columns`."""

    rows: float
    columns: float
    matrices: int = 1
    divisible: bool = False
    """Whether several processors can share one tile, so that no round leaves some without work."""


class Operator(NamedTuple):
    """One operator for one micro-batch."""

    kind: OperatorClass
    dtype: str
    """The type of numbers in which it computes."""
    flops: float
    """Its floating-point operations."""
    bytes: float
    """The bytes that it reads and writes."""
    other: tuple[Operator, ...] = ()
    """Kernels that get the same result in another way. A library takes the faster way."""
    grid: Grid | None = None
    """The matrices that it puts out, if their tiles are known to matter."""


def bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements. Elements of an expanded dimension count once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride:
            elements *= size
    return elements * x.element_size() if x.layout is torch.strided else 0


def dtype_of(x: Tensor) -> str:
    """Return the name of a tensor's type of numbers, such as 'float32'."""
    return str(x.dtype).removeprefix("torch.")


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator that ran.

    Args:
        operator: The operator.
        args: Its arguments by place.
        kwargs: Its arguments by name.
        result: What it returned.

    Returns:
        The number that PyTorch's formula gives, or 0 if there is no formula.
    """
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=result))


@functools.lru_cache(maxsize=1 << 16)
def excess(grid: Grid, processors: int) -> float:
    """Return how many times longer a product takes because of its tiles, with the best tile size.

    Args:
        grid: The matrices that are put out.
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
