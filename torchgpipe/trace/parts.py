"""Find the tensors in a structure, such as a dictionary or a dataclass, and replace them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.tensors.microbatch import Structured, is_flat

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


def cache_in(value: Any) -> str | None:
    """Return the name of the class of the first cache in a structure, or `None` without a cache.

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

    number: int = -1  # slots in older pickles have no number

    def __repr__(self) -> str:
        return "Tensor"


class Slots(TorchFunctionMode):
    """Takes tensors out of structures, and leaves a slot (placeholder) for each tensor.

    This class is a `TorchFunctionMode`, so that it can also take the tensors out of objects that it
    does not know: while the mode is active, `copy.deepcopy` copies a slot in place of each tensor.

    Args:
        slots: The slots to use first. More slots are made when all of them are used.
    """

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._slots = list(slots)

    def taken(self, value: Any) -> Any:
        """Return a copy of a structure with slots in place of its tensors.

        The tensors are added to the attribute `tensors`.
        """
        if isinstance(value, Tensor):
            return self._slot(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.taken, value))
        if type(value) is dict:
            return {key: self.taken(x) for key, x in value.items()}
        with self:
            return copy.deepcopy(value)

    def put_back(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of a structure with tensors in place of its slots: the inverse of `taken`.

        Args:
            value: The structure with slots.
            tensors: A tensor for each slot, in order.
        """
        ids = map(id, self._slots)
        return copy.deepcopy(value, dict(zip(ids, tensors, strict=True)))

    def again(self) -> Slots:
        """Return a new `Slots` with the same slots as this object, but with no tensors yet."""
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
    """A structure of tensors without its tensors: with tensors, it makes a copy of the structure.

    Args:
        value: The structure, with slots in place of its tensors.
        slots: The slots.
    """

    def __init__(self, value: Any, slots: Slots) -> None:
        self.value = value
        self._slots = slots

    @classmethod
    def of(cls, value: Any) -> tuple[Structure, list[Tensor]]:
        """Take a structure apart. Return it without its tensors, and the tensors."""
        slots = Slots()
        return cls(slots.taken(value), slots.again()), slots.tensors

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of the structure with these tensors in it."""
        return self._slots.put_back(self.value, tensors)


def as_tensors(output: Any) -> Any:
    """Return a layer's output as a tensor, a tuple of tensors, or `Structured` tensors.

    An output without tensors is returned as it is.
    """
    if is_flat(output):
        return output
    structure, tensors = Structure.of(output)
    return Structured.of(tensors, structure) if tensors else output
