"""Find the tensors in a structure, such as a dictionary or a dataclass, and replace them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe.tensors.microbatch import MicroBatches, Structured, is_flat, refuse_array
from torchgpipe.trace.code.call import Device, Held, Value

T = TypeVar("T")


def within(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield all objects of the class `kind` in a structure, in order.

    The structure can be nested. It consists of tuples, lists, sets, mappings, slices and
    dataclasses.
    """
    inner: Iterable[Any] = ()
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list | set):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, slice):
        inner = (value.start, value.stop, value.step)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    for x in inner:
        yield from within(x, kind)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a structure, such as nested lists and dictionaries, in order."""
    return within(value, Tensor)


def refuse_arrays(value: Any, what: str) -> None:
    """Raise `TypeError` if a value is a NumPy array with a dimension, or a structure with one.

    Args:
        value: The value.
        what: What the message calls the value.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        refuse_array(value, what)
        for array in within(value, numpy.ndarray):
            if array.ndim:
                raise TypeError(f"{what} has an ndarray; torch.from_numpy() makes a tensor of it")


def cache_in(value: Any) -> str | None:
    """Return the class name of the first cache in a structure, or `None` if there is no cache.

    A cache keeps what a model has computed for earlier tokens, such as a `DynamicCache` of Hugging
    Face. An object counts as a cache if the name of its class ends with "cache".
    """
    if type(value).__name__.lower().endswith("cache"):
        return type(value).__name__
    inner: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    return next(filter(None, map(cache_in, inner)), None)


@dataclass(unsafe_hash=True)
class Slot:
    """A placeholder for a tensor in a structure. The slots of a structure are numbered."""

    number: int = -1

    def __repr__(self) -> str:
        return "Tensor"


class Slots(TorchFunctionMode):
    """Takes the tensors out of nested arguments, and puts a slot (placeholder) in place of each.

    This also works for objects of unknown classes: they are copied by `copy.deepcopy`. This class
    is a `TorchFunctionMode`, which is active during the copying, and puts slots in place of the
    tensors in the copy.

    Args:
        slots: Slots to use again. If there are more tensors than slots, new slots are made.
    """

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._slots = list(slots)

    def taken(self, value: Any) -> Any:
        """Return a copy of a structure with slots (placeholders) in place of its tensors.

        The tensors are added to the attribute `tensors`.
        """
        if isinstance(value, Tensor):
            return self._slot(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.taken, value))
        if type(value) is dict:
            return {key: self.taken(x) for key, x in value.items()}
        # `copy.deepcopy` would clone a parameter in a dataclass, without a call of this mode.
        memo: dict[int, Any] = {}
        for x in tensors_in(value):
            if id(x) not in memo:
                memo[id(x)] = self._slot(x)
        with self:
            return copy.deepcopy(value, memo)

    def put_back(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of a structure with tensors in place of its slots: the inverse of `taken`.

        Args:
            value: The structure with slots.
            tensors: A tensor for each slot, in order.
        """
        ids = map(id, self._slots)
        return copy.deepcopy(value, dict(zip(ids, tensors, strict=True)))

    def again(self) -> Slots:
        """Return a new `Slots` object, to take tensors out of another structure of the same form.

        It uses the same slots (placeholders) as this object, but has no tensors yet.
        """
        return Slots(self._slots)

    def _slot(self, x: Tensor) -> Slot:
        number = len(self.tensors)
        self.tensors.append(x)
        if number == len(self._slots):
            self._slots.append(Slot(number))
        return self._slots[number]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._slot(args[0])
        return func(*args, **(kwargs or {}))


class Structure:
    """A structure, such as a dictionary, from which the tensors were taken out.

    A `Structure` can be called with other tensors. It returns a copy of the structure with these
    tensors in it.

    Args:
        value: The structure, with slots (placeholders) in place of its tensors.
        slots: The object that puts tensors into these slots.
    """

    def __init__(self, value: Any, slots: Slots) -> None:
        self.value = value
        self._slots = slots

    @classmethod
    def of(cls, value: Any) -> tuple[Structure, list[Tensor]]:
        """Take the tensors out of a structure; return a `Structure`, and a list of the tensors."""
        slots = Slots()
        return cls(slots.taken(value), slots.again()), slots.tensors

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of the structure with these tensors in it."""
        return self._slots.put_back(self.value, tensors)


def as_tensors(output: Any) -> Any:
    """Return a layer's output as a tensor, a tuple of tensors, or `Structured` tensors.

    An output without tensors is returned as it is.

    Raises:
        TypeError: If a function is in the output.
    """
    if is_flat(output):
        return output
    if any(within(output, FunctionType)):
        raise TypeError(
            "a layer returned a function, which can hold tensors with a graph; return the tensors"
        )
    structure, tensors = Structure.of(output)
    return Structured.of(tensors, structure) if tensors else output


def taken_apart(input: Any) -> Any:
    """Convert an input that is a structure, such as a dictionary, into `Structured` tensors.

    A structure is a mapping, a dataclass, or a tuple in which not all values are tensors. The first
    layer gets the same structure for each micro-batch: its tensors are split, and all other values
    are copied. An input that is not a structure is returned as it is.

    Raises:
        TypeError: If a structure has no tensors, or has lists, arrays, `MicroBatches`, or other
            objects that have tensors.
    """
    if isinstance(input, MicroBatches):
        return MicroBatches([taken_apart(each) for each in input])
    if isinstance(input, Tensor) or is_flat(input) or not _is_structure(input):
        return input
    _check_parts(input, "input")
    found = as_tensors(input)
    if not isinstance(found, Structured):
        raise TypeError(f"input must have tensors, but got {type(input).__name__} without any")
    if set(map(id, found)) != set(map(id, tensors_in(input))):
        raise TypeError(
            "input must be tensors in tuples, mappings and dataclasses, but some are in another "
            "object; a layer that needs another object has to make it of tensors"
        )
    return found


def _is_structure(value: Any) -> bool:
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return is_instance or isinstance(value, Mapping | tuple)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a structure, each with a text that says where it is."""
    if isinstance(value, tuple):
        for k, part in enumerate(value):
            yield f"element {k}", part
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key), part
    else:
        for field in fields(value):
            yield repr(field.name), getattr(value, field.name)


def _check_parts(value: Any, what: str) -> None:
    """Raise `TypeError` if a part of a structure cannot be split into micro-batches."""
    for where, part in _parts(value):
        place = f"{where} of {what}"
        refuse_array(part, place)
        if isinstance(part, MicroBatches):
            raise TypeError(
                f"{place} is MicroBatches, but only the whole input can be; give MicroBatches of "
                f"whole inputs, each with its own {where}"
            )
        if isinstance(part, list):
            raise TypeError(
                f"{place} is a list, which can have an entry for each sample; make a tensor of it, "
                "or give MicroBatches"
            )
        if _is_structure(part):
            _check_parts(part, place)


def check_sample(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `TypeError` if the arguments of a call have no tensor, but only a shape, for example.

    Args:
        module: The module that the arguments are for.
        args: The positional arguments of the sample.
        kwargs: The keyword arguments of the sample.
    """
    slots = Slots()
    slots.taken([*args, *kwargs.values()])
    if not slots.tensors:
        kinds = [type(x).__name__ for x in (*args, *kwargs.values())]
        raise TypeError(
            f"sample must have the tensors that {type(module).__name__} is called with, but has "
            f"only {', '.join(kinds)}; give a small batch, such as torch.zeros(8, 64)"
        )


def same(x: Any, y: Any) -> bool:
    """Return whether two values have equal contents; they can be different objects."""
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


def _form(x: Any, containers: tuple[int, ...] = ()) -> Any:
    """Return a value's type and contents in a form that can be compared with `==`.

    Two recordings can have different copies of an object. So most objects are compared by their
    contents, and only tensors and classes by their identity.

    Args:
        x: The value.
        containers: The ids of the objects that contain `x`.
    """
    if isinstance(x, _COMPARED):
        return type(x), x if x == x else "nan"
    if id(x) in containers:
        return containers.index(id(x))
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
    around = (*containers, id(x))
    return type(x), [_form(part, around) for part in parts]


def in_order_of(given: Any, value: Any) -> Any:
    """Return an argument whose dictionaries have their keys in the order of those in the sample.

    Dictionaries can be nested in dictionaries, lists and tuples.

    Args:
        given: The argument in the sample.
        value: The argument in a call.
    """
    kind = type(value)
    if kind is not type(given):
        return value
    if kind is dict and value.keys() == given.keys():
        return {key: in_order_of(given[key], value[key]) for key in given}
    if kind in (list, tuple) and len(value) == len(given):
        return kind(map(in_order_of, given, value))
    return value
