"""Compare results of layers: tensors, numbers, models, and containers of these.

Everything is compared bit by bit unless a tolerance is given, with its reason: the same operators run on the same
numbers, and a parameter's gradients are added up in the same order, from the last micro-batch to the first.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

REORDERED = 1e-5
"""The tolerance if gradients are added up in another order, relative to the largest value of a tensor."""
ZERO = 1e-8  # added to the largest value: smaller differences are rounding around zero


def found(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and strings in a value by name; a module has parameters, gradients and buffers."""
    if hasattr(value, "to_local"):  # a DTensor: this rank's shard
        value = value.to_local()
    if isinstance(value, Tensor):
        yield name, value
        if value.is_leaf and value.requires_grad:
            yield f"gradient of {name}", value.grad
    elif isinstance(value, nn.Module):
        for key, x in (*value.named_parameters(), *value.named_buffers()):
            yield from found(x, f"{name}{key}")
    elif isinstance(value, list | tuple):
        yield f"{name}length", len(value)
        for k, x in enumerate(value):
            yield from found(x, f"{name}{k} ")
    elif isinstance(value, dict):
        for key, x in value.items():
            yield from found(x, f"{name}{key} ")
    elif isinstance(value, bool | int | float | str | None):
        yield name, value


def differences(ours: Any, plain: Any, tolerance: float = 0.0) -> list[str]:
    """Return the differences of two values, a line for each name."""
    y, x = dict(found(ours)), dict(found(plain))
    said = {name: difference(y.get(name), x.get(name), tolerance) for name in sorted({*x, *y})}
    return [f"{name.strip()} {what}" for name, what in said.items() if what]


def difference(y: Any, x: Any, tolerance: float = 0.0) -> str:
    """Return how `y` differs from `x`, or ""."""
    if x is None or y is None:
        return "" if x is y else "missing" if y is None else "there, but not in the model"
    if isinstance(x, float) and isinstance(y, float):
        x, y = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return "" if type(x) is type(y) and x == y else f"is {y!r} for {x!r}"
    if (x.shape, x.dtype, x.device.type) != (y.shape, y.dtype, y.device.type):
        return f"shape {tuple(y.shape)} of {y.dtype} for {tuple(x.shape)} of {x.dtype}"
    if x.requires_grad != y.requires_grad:
        return "takes no gradient" if x.requires_grad else "takes a gradient"
    x, y = (each.detach().to_dense().as_subclass(Tensor).to(x.device) for each in (x, y))
    if x.is_meta or torch.equal(x, y):
        return ""
    x, y = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (x, y))
    most, largest = (x - y).abs().max().item(), x.abs().max().item()
    close = most <= tolerance * (largest + ZERO)
    return "" if close else f"differs by {most:.2g}, where the largest value is {largest:.2g}"
