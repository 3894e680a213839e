"""Compare the results of a pipeline with the results of plain layers (layers without a pipeline).

Values must be equal to the bit, unless a test gives a tolerance and a reason for it. Equal bits are
possible for two reasons:

1. A pipeline and plain layers run the same operators on the same numbers.
2. They add up the gradients of a parameter in the same order: from the last micro-batch to the
   first one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

REORDERED = 1e-5
"""The tolerance for gradients added up in another order, relative to the maximum of a tensor."""

ZERO = 1e-8
"""A number that is added to the maximum. Smaller differences are rounding errors of zero."""


@contextmanager
def named(case: str) -> Iterator[None]:
    """Turn any error within this context into an `AssertionError` that names the test case."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"the case {case!r} failed") from error


def found(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a name and a value for each tensor, number and string in a test's result.

    The result can be nested in tuples, lists and dictionaries. Of a module, this function yields
    the parameters, their gradients, and the buffers.
    """
    if hasattr(value, "to_local"):  # a DTensor: take the shard of this rank
        value = value.to_local()
    if isinstance(value, Tensor):
        yield name, value
        if value.is_leaf and value.requires_grad:
            yield f"gradient of {name}", value.grad
    elif isinstance(value, bool | int | float | str | None):
        yield name, value
    else:
        for key, part in _parts(value):
            yield from found(part, f"{name}{key}")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, list | tuple):
        yield "length", len(value)
        for k, part in enumerate(value):
            yield f"{k} ", part
    elif isinstance(value, dict):
        for key, part in value.items():
            yield f"{key} ", part


def differences(ours: Any, plain: Any, tolerance: float = 0.0) -> list[str]:
    """Compare a pipeline's results with those of plain layers.

    Returns:
        A line of text for each value that differs, with the value's name.
    """
    y, x = dict(found(ours)), dict(found(plain))
    lines = []
    for name in sorted({*x, *y}):
        what = difference(y.get(name), x.get(name), tolerance)
        if what:
            lines.append(f"{name.strip()} {what}")
    return lines


def difference(y: Any, x: Any, tolerance: float = 0.0) -> str:
    """Return how a result `y` differs from the expected `x`, or "" if they are equal."""
    if y is None:
        return "" if x is None else "missing"
    if x is None:
        return "there, but not in the model"
    if isinstance(x, float) and isinstance(y, float):
        x = torch.tensor(x, dtype=torch.float64)
        y = torch.tensor(y, dtype=torch.float64)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _difference_of_tensors(y, x, tolerance)
    same = type(x) is type(y) and x == y
    return "" if same else f"is {y!r} for {x!r}"


def _difference_of_tensors(y: Tensor, x: Tensor, tolerance: float) -> str:
    if x.shape != y.shape or x.dtype != y.dtype or x.device.type != y.device.type:
        return f"shape {tuple(y.shape)} of {y.dtype} for {tuple(x.shape)} of {x.dtype}"
    if x.requires_grad != y.requires_grad:
        return "takes no gradient" if x.requires_grad else "takes a gradient"
    y = _dense(y).to(x.device)
    x = _dense(x)
    if x.is_meta or torch.equal(x, y):
        return ""
    precise = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(precise), y.to(precise)
    most = (x - y).abs().max().item()
    largest = x.abs().max().item()
    if most <= tolerance * (largest + ZERO):
        return ""
    return f"differs by {most:.2g}, where the largest value is {largest:.2g}"


def _dense(x: Tensor) -> Tensor:
    return x.detach().to_dense().as_subclass(Tensor)
