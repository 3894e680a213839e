"""Test cases about dtypes, sizes of batches, sizes of partitions, and options turned off."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....library.layers import same
from ...parts.layers import WIDTH, made
from ...row import Row


def batch(size: int) -> Tensor:
    return torch.randn(size, WIDTH).requires_grad_()


def cast(x: Tensor, to: torch.dtype) -> Tensor:
    """Cast a tensor to a dtype. For a real dtype, drop the imaginary part of complex numbers."""
    if x.is_complex() and not to.is_complex:
        x = x.real
    return x.to(to)


def typed(*types: torch.dtype) -> Any:
    """Return a function that builds a model with a linear layer for each of the given dtypes."""
    factories: list[Any] = []
    for dtype in types:
        to_dtype = partial(cast, to=dtype)
        factories.append(partial(same, to_dtype))
        factories.append(partial(nn.Linear, WIDTH, WIDTH, dtype=dtype))
        factories.append(nn.Tanh)
    return made(*factories)


ROWS: list[Row] = []
for dtype in (torch.float16, torch.bfloat16, torch.complex64):
    given = partial(torch.randn, 8, WIDTH, dtype=dtype, requires_grad=True)
    ROWS.append(Row(f"types {dtype}", typed(dtype), given))
several = typed(torch.float32, torch.complex128, torch.float64)
ROWS.append(Row("several types", several, balance=(2, 2, 2, 3)))
for size, m in ((13, 8), (13, 2), (8, 8), (8, 3), (1, 2), (1, 20), (0, 3), (8, 20)):
    ROWS.append(Row(f"{size} samples, {m} micro-batches", given=partial(batch, size), chunks=m))
for balance in ((2, 3), (2, 1, 1, 1), (1, 1, 3)):
    name = f"a balance of {balance}"
    ROWS.append(Row(name, given=partial(batch, 13), balance=balance, chunks=8))
for component in ("dependency", "portals", "copy_streams"):
    row = Row(
        f"without {component}",
        given=partial(batch, 13),
        balance=(2, 1, 1, 1),
        chunks=8,
        options={component: False},
        without={"ranks": "they have no such components"},
    )
    ROWS.append(row)
