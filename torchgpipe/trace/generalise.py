"""Make of recordings for several batch sizes one list of steps that is right for all of them.

Where a number differs between the recordings, it has to grow evenly with the batch size. Anything else that differs
means that the module does something else for other batch sizes, which a fixed list of steps cannot repeat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.trace.calls import Call, Device, Held, Recording, Value
from torchgpipe.trace.parts import Slot
from torchgpipe.trace.refuse import Untraceable, refused, where

SIZES = (2, 3, 5)
"""The batch sizes that are recorded: two give a line, and the third has to be on it."""


@dataclass(frozen=True)
class Grows:
    """A whole number that depends on the batch size: `each` for a sample, and `fixed`."""

    each: int
    fixed: int


def generalise(root: nn.Module, recordings: Sequence[Recording]) -> list[Call]:
    """Return the calls of the recordings, with `Grows` for numbers that differ; other differences are `Untraceable`."""
    sizes = [recording.size for recording in recordings]
    calls: list[Call] = []
    try:
        for step in zip(*(recording.calls for recording in recordings), strict=False):
            at = (call := step[0]).where
            kept = (call.target, call.outputs, call.grad, call.since)
            if any((c.target, c.outputs, c.grad, c.since) != kept for c in step):
                raise _Differs("it calls something else")
            args, kwargs = general([(c.args, c.kwargs) for c in step], sizes)
            calls.append(call._replace(args=args, kwargs=kwargs))
        lengths = [len(recording.calls) for recording in recordings]
        if len(set(lengths)) > 1:
            at = max(recordings, key=lambda r: len(r.calls)).calls[min(lengths)].where
            raise _Differs(f"it makes {', '.join(map(str, lengths))} calls")
        ends = [(r.outputs, r.result[0], r.extra) for r in recordings]
        if not all(same(end, ends[0]) for end in ends):
            said = ", ".join(repr(r.result[0]) for r in recordings)[:200]
            raise _Differs(
                f"it uses other tensors that it holds, or returns {said}; a pipeline can return tensors alone, and "
                "what is the same for all"
            )
    except _Differs as error:
        shown = ", ".join(f"{recording.size}{recording.state}" for recording in recordings)
        raise refused(
            root,
            at,
            f"with batches of {shown} samples it does not do the same: {error}",
            "keep the module with this line as one layer, whole=[ItsClass], or say which inputs have "
            "no batch dimension, shared=[…]",
        ) from None
    return calls


def check_batch(module: nn.Module, recordings: Sequence[Recording]) -> None:
    """Refuse outputs without a batch dimension."""
    if not recordings[0].outputs:
        raise Untraceable(f"{type(module).__name__} returns no tensor")
    for recording in recordings:
        for first, number in zip(recordings[0].outputs, recording.outputs, strict=False):
            shape = recording.shapes[number]
            if shape != (recording.size, *recordings[0].shapes[first][1:]):
                at = next(
                    (call.where for call in recording.calls if number in call.outputs), where()
                )
                raise refused(
                    module,
                    at,
                    f"it returns a tensor of shape {shape} for {recording.size} samples, but outputs of "
                    "micro-batches are concatenated along dimension 0, and no other may grow with the batch",
                    "what compares samples or adds them up, such as a loss, belongs after the pipeline: "
                    "return what it is made of; or say which inputs have no batch dimension, shared=[…]",
                )


class _Differs(Exception):
    """Say in what recordings differ."""


def general(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what the values for these batch sizes have in common, with `Grows` in place of numbers that differ."""
    first = values[0]
    kind = type(first) if all(type(value) is type(first) for value in values) else None
    if kind is int and any(value != first for value in values):
        each = (values[1] - first) // (sizes[1] - sizes[0])
        fixed = first - each * sizes[0]
        if all(value == each * size + fixed for value, size in zip(values, sizes, strict=True)):
            return Grows(each, fixed)
    elif kind in (tuple, list) and all(len(value) == len(first) for value in values):
        return kind(general(column, sizes) for column in zip(*values, strict=True))
    elif kind is dict and all(value.keys() == first.keys() for value in values):
        return {key: general([value[key] for value in values], sizes) for key in first}
    elif kind is slice:
        return slice(*general([(value.start, value.stop, value.step) for value in values], sizes))
    elif all(same(value, first) for value in values):
        return first
    raise _Differs(f"it passes {', '.join(map(repr, values))}")


def same(x: Any, y: Any) -> bool:
    """Return whether two values are the same in all that is in them; an object may be a copy of the other."""
    return bool(_form(x) == _form(y))


# What is equal or not by itself.
_COMPARED = (
    Value,
    Held,
    Device,
    Slot,
    int,
    float,
    str,
    bytes,
    complex,
    torch.dtype,
    torch.layout,
    CodeType,
)


def _form(x: Any, within: tuple[int, ...] = ()) -> Any:
    """Return what tells a value from others. An object, which the recordings may have copied, is what is in it."""
    if isinstance(x, _COMPARED):
        return type(x), x if x == x else "nan"
    if id(x) in within:
        return within.index(id(x))
    if isinstance(x, type | Tensor):
        return id(x)
    parts = [*x, *x.values()] if isinstance(x, dict) else x
    if isinstance(x, FunctionType):
        parts = [
            x.__code__,
            x.__defaults__,
            x.__kwdefaults__,
            [cell.cell_contents for cell in x.__closure__ or ()],
        ]
    elif not isinstance(x, dict | tuple | list):
        try:
            found = x.__reduce_ex__(4)
        except Exception:  # whatever says that it cannot be copied
            return object()
        parts = (
            [id(x)]
            if isinstance(found, str)
            else [[*y] if isinstance(y, Iterator) else y for y in found]
        )
    return type(x), [_form(y, (*within, id(x))) for y in parts]
