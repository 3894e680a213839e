"""Micro-batches: check a mini-batch, scatter it, gather the outputs (GPipe paper, section 2.2)."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

TensorOrTensors = Tensor | tuple[Tensor, ...]

Flat = tuple[Tensor | None, ...]
"""A task's inputs or outputs in a row: the micro-batch's tensors, then the skips."""

Form = type[Any]
"""The class of a micro-batch: `Tensor` for every single tensor, `tuple`, or a class of tuples, as of a namedtuple."""


def tensors_of(value: TensorOrTensors) -> tuple[Tensor, ...]:
    """Return the tensors of `value` as a tuple."""
    return (value,) if isinstance(value, Tensor) else value


def form_of(value: TensorOrTensors) -> Form:
    """Return the form of `value`."""
    return Tensor if isinstance(value, Tensor) else type(value)


def together(form: Form, tensors: Flat) -> Any:
    """Return the tensors in a form."""
    if form is Tensor:
        return tensors[0]
    # As namedtuples do, in whatever way the class makes its own; PyTorch's (torch.return_types) allow no other way.
    return (
        tensors
        if form is tuple
        else form(tensors)
        if hasattr(form, "n_fields")
        else tuple.__new__(form, tensors)
    )


def carrying(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` with the attributes that Python code has given to `x`, such as `x.scale = 3.0`."""
    if given := x.__dict__:
        y.__dict__.update(given | y.__dict__)
    return y


def moved(tensors: Flat, device: torch.device, *, non_blocking: bool = False) -> Flat:
    """Return the tensors on a device, with their attributes."""
    return tuple(
        [
            None if x is None else carrying(x.to(device, non_blocking=non_blocking), x)
            for x in tensors
        ]
    )


def mapped(function: Callable[[Tensor], Tensor], value: TensorOrTensors) -> TensorOrTensors:
    """Return what `function` makes of each tensor of `value`."""
    return together(form_of(value), tuple(map(function, tensors_of(value))))  # type: ignore[no-any-return]


def check(value: object, what: str = "input") -> None:
    """Check that `value` is a tensor, or a non-empty tuple of tensors; raise `TypeError` where it is not."""
    if isinstance(value, Tensor):
        return
    if not isinstance(value, tuple) or not value:
        got = "an empty tuple" if value == () else type(value).__name__
        raise TypeError(f"{what} must be a tensor or a tuple of tensors, but got {got}")
    for k, item in enumerate(value):
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{what} must be a tuple of tensors, but element {k} is {type(item).__name__}"
            )


def scatter(
    value: TensorOrTensors, chunks: int, batched: Sequence[bool] | None = None
) -> list[TensorOrTensors]:
    """Split a mini-batch along dimension 0 into at most `chunks` micro-batches.

    Every tensor is split alike, into parts of ⌈batch / chunks⌉ samples; the last one may be smaller, and where
    that covers the batch earlier there are fewer than `chunks` (13 samples in 8 chunks make 7). A tensor that is not
    `batched` has no batch dimension, and is given to every micro-batch; by default all are.
    """
    tensors = tensors_of(value)
    split = [True] * len(tensors) if batched is None else batched
    for k, x in enumerate(tensors):
        if split[k] and x.dim() == 0:
            raise ValueError(
                f"every input tensor needs a batch dimension, but tensor {k} is a scalar"
            )
    sizes = [x.size(0) for x, each in zip(tensors, split, strict=True) if each]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"all input tensors must have one batch size (dimension 0), but they have {sizes}"
        )

    if chunks == 1 or not sizes:
        return [value]
    columns = [
        x.chunk(chunks) if each else repeat(x) for x, each in zip(tensors, split, strict=True)
    ]
    return [*map(partial(together, form_of(value)), zip(*columns, strict=False))]


def gather(outputs: list[TensorOrTensors]) -> TensorOrTensors:
    """Concatenate the micro-batches' outputs, which have to be alike, along dimension 0, in order; undo `scatter`."""
    if len(outputs) == 1:
        return outputs[0]
    expected = _structure(outputs[0])
    for i, y in enumerate(outputs):
        if _structure(y) != expected:
            raise TypeError(
                f"outputs of all micro-batches have to be alike, but micro-batch 0 returned {expected} "
                f"and micro-batch {i} {_structure(y)}; return the same for every input"
            )
    columns = list(zip(*map(tensors_of, outputs), strict=True))
    if any(y.dim() == 0 for column in columns for y in column):
        raise ValueError(
            "outputs of micro-batches are concatenated along the batch dimension, but the last partition "
            "returned a scalar; move a loss that reduces the batch out of the pipeline"
        )
    return together(form_of(outputs[0]), tuple([torch.cat(column) for column in columns]))  # type: ignore[no-any-return]


def _structure(y: TensorOrTensors) -> str:
    return "a tensor" if isinstance(y, Tensor) else f"a tuple of {len(y)}"
