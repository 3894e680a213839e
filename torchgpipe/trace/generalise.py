"""Make of recordings for several batch sizes one list of steps that is right for all of them.

Where a number differs between the recordings, it has to grow evenly with the batch size. Anything else that differs
means that the module does something else for other batch sizes, which a fixed list of steps cannot repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchgpipe.trace.calls import Call, Device, Held, Recording, Value
from torchgpipe.trace.parts import Slot
from torchgpipe.trace.refuse import Untraceable, refused

SIZES = (2, 3, 5)
"""The batch sizes that are recorded: two give a line, and the third has to be on it."""


@dataclass(frozen=True)
class Grows:
    """A whole number that depends on the batch size: `each` for a sample, and `fixed`."""

    each: int
    fixed: int


def generalise(root: nn.Module, recordings: Sequence[Recording]) -> list[Call]:
    """Return the calls of the recordings, with `Grows` in place of numbers that differ.

    Raises:
        Untraceable: the recordings differ otherwise; it says at which line.
    """
    first = recordings[0]
    calls = []
    for step in zip(*(recording.calls for recording in recordings), strict=False):
        call = step[0]
        try:
            if any((c.target, c.outputs, c.grad, c.since) != (call.target, call.outputs, call.grad, call.since)
                   for c in step):  # fmt: skip
                raise _Differs("it calls something else")
            args, kwargs = _general([(c.args, c.kwargs) for c in step])
        except _Differs as error:
            raise _refusal(root, call.where, str(error)) from None
        calls.append(Call(call.target, args, kwargs, call.outputs, call.caller, call.since, call.grad, call.where))
    lengths = [len(recording.calls) for recording in recordings]
    if len(set(lengths)) > 1:
        at = max(recordings, key=lambda r: len(r.calls)).calls[min(lengths)].where
        raise _refusal(root, at, f"it makes {', '.join(map(str, lengths))} calls")
    if any(recording.outputs != first.outputs for recording in recordings):
        raise Untraceable(f"{type(root).__name__} returns something else for other batch sizes")
    return calls


def batch_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """Return a dimension that grows with the batch size, and its length for one sample; `None` if there is none."""
    for dimension, lengths in enumerate(zip(*shapes, strict=False)):
        each = lengths[0] // SIZES[0]
        if each > 0 and all(n == each * size for n, size in zip(lengths, SIZES, strict=True)):
            return dimension, each
    return None


class _Differs(Exception):
    pass


def _refusal(root: nn.Module, where: tuple[str, int], why: str) -> Untraceable:
    sizes = ", ".join(map(str, SIZES))
    return Untraceable(
        refused(
            root, where, f"with batches of {sizes} samples it does something else each time: {why}",
            "keep the module with this line as one layer, whole=[ItsClass], or say which inputs have no batch "
            "dimension, shared=[…]",
        )
    )  # fmt: skip


def _general(values: Sequence[Any]) -> Any:
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        raise _Differs(f"it passes {', '.join(map(_shown, values))}")
    if kind is int and any(value != first for value in values):
        each, rest = divmod(values[1] - first, SIZES[1] - SIZES[0])
        fixed = first - each * SIZES[0]
        if rest or any(value != each * size + fixed for value, size in zip(values, SIZES, strict=True)):
            raise _Differs(f"it passes {', '.join(map(_shown, values))}")
        return Grows(each, fixed)
    if kind in (tuple, list) and all(len(value) == len(first) for value in values):
        return kind(map(_general, zip(*values, strict=True)))
    if kind is dict and all(value.keys() == first.keys() for value in values):
        return {key: _general([value[key] for value in values]) for key in first}
    if kind is slice:
        return slice(*(_general([getattr(value, name) for value in values]) for name in ("start", "stop", "step")))
    if not all(_same(value, first) for value in values):
        raise _Differs(f"it passes {', '.join(map(_shown, values))}")
    return first


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, float) and x != x:
        return bool(y != y)
    if isinstance(x, Value | Held | Device | Slot | torch.dtype | int | float | str | bytes | complex):
        return bool(x == y)
    # Objects that the recordings copied, or that have no equality of their own.
    return x is y or bool(getattr(x, "__dict__", repr(x)) == getattr(y, "__dict__", repr(y)))


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
