"""What an operator is to prediction: its class, floating-point operations, and bytes read and written.

An operator is what reaches PyTorch's dispatcher below autograd: on a GPU about one kernel each. Libraries cut what a
product of matrices puts out into tiles of fixed sizes, and each is one processor's work. A tile that sticks out over
the edge takes as long as a full one, and so does the last round, in which some processors have none.

This is the one place that touches PyTorch's table of floating-point operations, which it does not promise to keep:
`tests/library/plan/count/test_counter.py` fails, by name, when it moves.
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
"""The classes that have efficiencies of their own: `conv3x3` are those convolutions for which libraries have Winograd
kernels, 3 x 3 at stride 1, when they are computed like any other, and `winograd` when they are not (convolution.py);
`attention` is that of fused kernels (attention.py), and `elementwise` is whatever reads and writes memory and has no
class of its own."""
CLASSES: tuple[str, ...] = get_args(OperatorClass)

TILES = ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128))
"""The sizes that are tried: those in the names of cuDNN's and cuBLAS's kernels in float32 (`..._128x64_...`)."""


class Grid(NamedTuple):
    """What an operator's products put out: a number of `matrices` of `rows` by `columns`."""

    rows: float
    columns: float
    matrices: int = 1
    divisible: bool = False
    """Whether processors can also share the sums of one tile, so that no round has too few."""


class Operator(NamedTuple):
    """One operator on one micro-batch: `flops` in the floating-point type `dtype`, `bytes` read and written."""

    kind: OperatorClass
    dtype: str
    flops: float
    bytes: float
    other: tuple[Operator, ...] = ()
    """The kernels of another way to the same result, where there is one; a library takes the faster way."""
    grid: Grid | None = None
    """The matrices that its floating-point operations put out, where tiles of them are known to matter."""


def bytes_of(x: Tensor) -> int:
    """Return the bytes of the elements that are really there: an expanded dimension is read once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return math.prod(sizes) * x.element_size() if x.layout is torch.strided else 0


def dtype_of(x: Tensor) -> str:
    """Return the name of a tensor's type of numbers, such as 'float32'."""
    return str(x.dtype).removeprefix("torch.")


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator that was called, by its formula; 0 where it has none."""
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


@functools.lru_cache(maxsize=1 << 16)
def excess(grid: Grid, processors: int) -> float:
    """Return how many times longer than its multiplications a product takes, with the best size of tiles."""
    least = math.inf
    for rows, columns in TILES:
        tiles = grid.matrices * math.ceil(grid.rows / rows) * math.ceil(grid.columns / columns)
        busy = tiles if grid.divisible else math.ceil(tiles / processors) * processors
        least = min(least, busy * rows * columns / (grid.matrices * grid.rows * grid.columns))
    return least
