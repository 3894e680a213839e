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
    sizes = [recording.size for recording in recordings]
    shown = ", ".join(f"{recording.size}{recording.state}" for recording in recordings)
    calls = []
    for step in zip(*(recording.calls for recording in recordings), strict=False):
        call = step[0]
        try:
            if any((c.target, c.outputs, c.grad, c.since) != (call.target, call.outputs, call.grad, call.since)
                   for c in step):  # fmt: skip
                raise _Differs("it calls something else")
            args, kwargs = general([(c.args, c.kwargs) for c in step], sizes)
        except _Differs as error:
            raise _refusal(root, shown, call.where, str(error)) from None
        calls.append(Call(call.target, args, kwargs, call.outputs, call.caller, call.since, call.grad, call.where))
    lengths = [len(recording.calls) for recording in recordings]
    if len(set(lengths)) > 1:
        at = max(recordings, key=lambda r: len(r.calls)).calls[min(lengths)].where
        raise _refusal(root, shown, at, f"it makes {', '.join(map(str, lengths))} calls")
    ends = [(r.outputs, r.result[0], r.extra) for r in recordings]
    if not all(same(end, ends[0]) for end in ends):
        said = ", ".join(_shown(r.result[0]) for r in recordings)[:200]
        raise _refusal(root, shown, calls[-1].where, f"it uses other tensors that it holds, or returns {said}; a "
                       "pipeline can return tensors alone, and what is the same for all")  # fmt: skip
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


def _refusal(root: nn.Module, sizes: str, where: tuple[str, int], why: str) -> Untraceable:
    why = f"with batches of {sizes} samples it does not do the same: {why}"
    which = "keep the module with this line as one layer, whole=[ItsClass]"
    return Untraceable(refused(root, where, why, f"{which}, or say which inputs have no batch dimension, shared=[…]"))


def general(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what the values for these batch sizes have in common, with `Grows` in place of numbers that differ."""
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        raise _Differs(f"it passes {', '.join(map(_shown, values))}")
    if kind is int and any(value != first for value in values):
        each, rest = divmod(values[1] - first, sizes[1] - sizes[0])
        fixed = first - each * sizes[0]
        if rest or any(value != each * size + fixed for value, size in zip(values, sizes, strict=True)):
            raise _Differs(f"it passes {', '.join(map(_shown, values))}")
        return Grows(each, fixed)
    if kind in (tuple, list) and all(len(value) == len(first) for value in values):
        return kind(general(column, sizes) for column in zip(*values, strict=True))
    if kind is dict and all(value.keys() == first.keys() for value in values):
        return {key: general([value[key] for value in values], sizes) for key in first}
    if kind is slice:
        return slice(*general([(value.start, value.stop, value.step) for value in values], sizes))
    if not all(same(value, first) for value in values):
        raise _Differs(f"it passes {', '.join(map(_shown, values))}")
    return first


def same(x: Any, y: Any) -> bool:
    """Return whether two values are the same in all that is in them; an object may be a copy of the other."""
    return bool(_form(x) == _form(y))


def _form(x: Any, within: tuple[int, ...] = ()) -> Any:
    """Return what tells a value from others. An object, which the recordings may have copied, is what is in it."""
    if isinstance(x, Value | Held | Device | Slot | int | float | str | bytes | complex | torch.dtype | CodeType):
        return type(x), x if x == x else "nan"
    if id(x) in within:
        return within.index(id(x))
    if isinstance(x, type | Tensor):
        return id(x)
    parts = [*x, *x.values()] if isinstance(x, dict) else x
    if isinstance(x, FunctionType):
        parts = [x.__code__, x.__defaults__, x.__kwdefaults__, [cell.cell_contents for cell in x.__closure__ or ()]]
    elif not isinstance(x, dict | tuple | list):
        try:
            found = x.__reduce_ex__(4)
        except Exception:  # whatever says that it cannot be copied
            return object()
        parts = [id(x)] if isinstance(found, str) else [[*y] if isinstance(y, Iterator) else y for y in found]
    return type(x), [_form(y, (*within, id(x))) for y in parts]


def _shown(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
