"""What an operator is to prediction: its class, floating-point operations, and bytes read and written.

An operator is what reaches PyTorch's dispatcher below autograd: on a GPU about one kernel each.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchgpipe.plan.hardware.tiles import Grid

OperatorClass = Literal[
    "matmul", "conv", "conv3x3", "winograd", "attention", "attention_backward", "norm", "pool", "elementwise"
]
"""The classes that have efficiencies of their own: `conv3x3` are those convolutions for which libraries have Winograd
kernels, 3 x 3 at stride 1, when they are computed like any other, and `winograd` when they are not (convolution.py);
`attention` is that of fused kernels (attention.py), and `elementwise` is whatever reads and writes memory and has no
class of its own."""
CLASSES: tuple[str, ...] = get_args(OperatorClass)


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
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size() if x.layout is torch.strided else 0


def dtype_of(x: Tensor) -> str:
    """Return the name of a tensor's type of numbers, such as 'float32'."""
    return str(x.dtype).removeprefix("torch.")
