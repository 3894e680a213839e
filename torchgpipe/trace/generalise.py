"""Merge recordings for several batch sizes into one list of calls for all batch sizes.

If a number differs between the recordings, it has to be a linear function of the batch size. If
anything else differs, the module makes other calls for other batch sizes. A fixed list of calls
cannot repeat this, so an error is raised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.trace.calls import Call, Device, Held, RecordedCalls, Value
from torchgpipe.trace.parts import Slot
from torchgpipe.trace.refuse import Untraceable, Where, refused, where

SIZES = (2, 3, 5)
"""The batch sizes to record: two of them define a line, and the third has to be on the line."""


@dataclass(frozen=True)
class Grows:
    """A placeholder for a number that is a linear function of the batch size.

    The number is `each * (batch size) + fixed`.

    Attributes:
        each: How much the number increases for each additional sample.
        fixed: The part of the number that does not depend on the batch size.
    """

    each: int
    fixed: int


_OTHER_CALLS = (
    "keep the submodule that has this line as one layer, whole=[ItsClass], or say which arguments "
    "have no batch dimension, shared=[…]"
)
_ONE_SAMPLE = (
    "a module can make other calls for a single sample: give sequential two samples or more, and "
    "the pipeline micro-batches of two samples or more"
)


def generalise(root: nn.Module, recordings: Sequence[RecordedCalls]) -> list[Call]:
    """Merge the recordings into one list of calls. Numbers that differ are replaced by `Grows`.

    Raises:
        Untraceable: If the recordings differ in anything but numbers that grow with the batch size.
    """
    sizes: list[int] = []
    lists: list[list[Call]] = []
    samples: list[str] = []
    for recording in recordings:
        sizes.append(recording.size)
        lists.append(recording.calls)
        samples.append(f"{recording.size}{recording.state}")
    calls: list[Call] = []
    at: Where | None = None  # the line that is compared; None before the first call
    try:
        for step in zip(*lists, strict=False):
            call = step[0]
            at = call.where
            passed = []
            for other in step:
                if _fixed(other) != _fixed(call):
                    raise Differs("it calls something else")
                passed.append((other.args, other.kwargs))
            args, kwargs = general(passed, sizes)
            calls.append(call._replace(args=args, kwargs=kwargs))
        lengths = list(map(len, lists))
        if len(set(lengths)) > 1:
            longest = max(lists, key=len)
            at = longest[min(lengths)].where
            raise Differs(f"it makes {', '.join(map(str, lengths))} calls")
        _check_ends(recordings)
    except Differs as error:
        raise refused(
            root,
            at,
            f"with batches of {', '.join(samples)} samples it does not do the same: {error}",
            _ONE_SAMPLE if 1 in sizes else _OTHER_CALLS,
        ) from None
    return calls


_fixed = attrgetter("target", "outputs", "grad", "since")


def _check_ends(recordings: Sequence[RecordedCalls]) -> None:
    """Raise `Differs` if the recordings return different structures or use different constants."""
    structures: list[Any] = []
    ends: list[Any] = []
    for recording in recordings:
        structure = recording.result[0]
        structures.append(structure)
        ends.append((recording.outputs, structure, recording.extra))
    if not all(same(end, ends[0]) for end in ends):
        returned = ", ".join(map(repr, structures))
        raise Differs(
            f"it uses different constant tensors, or returns {returned[:200]}; a pipeline can only "
            "return tensors, and values that are equal for all batch sizes"
        )


def check_batch(module: nn.Module, recordings: Sequence[RecordedCalls]) -> None:
    """Raise an error if the module returns no tensor, or a tensor without a batch dimension."""
    first = recordings[0]
    if not first.outputs:
        raise Untraceable(f"{type(module).__name__} returns no tensor")
    for recording in recordings:
        for number, own in zip(first.outputs, recording.outputs, strict=False):
            shape = recording.shapes[own]
            expected = first.shapes[number]
            if shape == (recording.size, *expected[1:]):
                continue
            at = where()
            for call in recording.calls:
                if own in call.outputs:
                    at = call.where
                    break
            if (
                shape[1:2] == (recording.size,)
                and shape[:1] + shape[2:] == expected[:1] + expected[2:]
            ):
                raise refused(
                    module,
                    at,
                    f"it returns a tensor of shape {shape} for {recording.size} samples, but "
                    "outputs of micro-batches are concatenated along dimension 0",
                    "the batch is in dimension 1, as in the state of an RNN: return "
                    "state.transpose(0, 1), and transpose it back after the pipeline",
                )
            raise refused(
                module,
                at,
                f"it returns a tensor of shape {shape} for {recording.size} samples, but outputs "
                "of micro-batches are concatenated along dimension 0, and no other dimension may "
                "grow with the batch",
                "code that compares samples or adds them up, such as a loss, belongs after the "
                "pipeline: return the inputs of this code; or say which arguments have no batch "
                "dimension, shared=[…]",
            )


class Differs(Exception):
    """An internal error whose message says how recordings differ."""


def general(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Merge the arguments of one call, recorded for several batch sizes, into one value.

    Numbers that differ are replaced by `Grows`.

    Args:
        values: The value that was recorded for each batch size.
        sizes: The batch sizes.

    Raises:
        Differs: If the values differ in anything but numbers that grow with the batch size.
    """
    first = values[0]
    kinds = set(map(type, values))
    kind = type(first) if len(kinds) == 1 else None
    if kind is int and len(set(values)) > 1:
        each = (values[1] - first) // (sizes[1] - sizes[0])
        fixed = first - each * sizes[0]
        if list(values) == [each * size + fixed for size in sizes]:
            return Grows(each, fixed)
    elif kind in (tuple, list) and len(set(map(len, values))) == 1:
        columns = zip(*values, strict=True)
        return kind([general(column, sizes) for column in columns])
    elif kind is dict and len(set(map(frozenset, values))) == 1:
        found = {}
        for key in first:
            found[key] = general(list(map(itemgetter(key), values)), sizes)
        return found
    elif kind is slice:
        ends = list(map(attrgetter("start", "stop", "step"), values))
        return slice(*general(ends, sizes))
    elif all(same(value, first) for value in values):
        return first
    raise Differs(f"it passes {', '.join(map(repr, values))}")


def same(x: Any, y: Any) -> bool:
    """Return whether two values have equal contents, even if they are different objects."""
    return bool(_form(x) == _form(y))


# Values of these types are compared by `==`.
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
    """Return a value's type and contents in a form that can be compared with `==`.

    Two recordings can have different copies of one object. So most objects are compared by their
    contents, and not by their ids. Tensors and classes are compared by their ids.

    Args:
        x: The value.
        within: The ids of the objects that contain `x`.
    """
    if isinstance(x, _COMPARED):
        return type(x), x if x == x else "nan"
    if id(x) in within:
        return within.index(id(x))
    if isinstance(x, type | Tensor):
        return id(x)
    parts: Any
    if isinstance(x, FunctionType):
        closure = list(map(attrgetter("cell_contents"), x.__closure__ or ()))
        parts = [x.__code__, x.__defaults__, x.__kwdefaults__, closure]
    elif isinstance(x, dict):
        parts = [*x, *x.values()]
    elif isinstance(x, tuple | list):
        parts = x
    else:
        try:
            reduced = x.__reduce_ex__(4)
        except Exception:  # An object that cannot be copied is not equal to any other.
            return object()
        if isinstance(reduced, str):
            parts = [id(x)]
        else:
            parts = [[*part] if isinstance(part, Iterator) else part for part in reduced]
    around = (*within, id(x))
    return type(x), [_form(part, around) for part in parts]
