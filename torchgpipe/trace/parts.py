"""The tensors in a structure, such as a dictionary or a dataclass: find them, take them out, put others back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


def within(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield what is of this kind in tuples, lists, sets, dictionaries, slices and dataclasses, in their order."""
    inner: Iterable[Any] = ()
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list | set):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, slice):
        inner = (value.start, value.stop, value.step)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        inner = [getattr(value, name) for name in value.__dataclass_fields__]
    for x in inner:
        yield from within(x, kind)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a structure, in their order."""
    return within(value, Tensor)


@dataclass(unsafe_hash=True)
class Slot:
    """The place of a tensor in a structure. Two recordings are compared by its number."""

    number: int = -1  # older pickles have none

    def __repr__(self) -> str:
        return "Tensor"


class Slots(TorchFunctionMode):
    """The tensors that are taken out of structures; a slot is left in the place of each.

    As a mode, it lets `copy.deepcopy` leave slots, whatever holds the tensors.
    """

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._slots = list(slots)

    def taken(self, value: Any) -> Any:
        """Return a copy of `value` with slots in place of its tensors; the tensors are added to `tensors`."""
        if isinstance(value, Tensor):
            return self._slot(value)
        if type(value) in (tuple, list):
            return type(value)(map(self.taken, value))
        if type(value) is dict:
            return {key: self.taken(x) for key, x in value.items()}
        with self:
            return copy.deepcopy(value)

    def put_back(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of `value` with tensors in place of the slots."""
        return copy.deepcopy(
            value, {id(slot): x for slot, x in zip(self._slots, tensors, strict=True)}
        )

    def again(self) -> Slots:
        """Return a copy without tensors, which leaves the same slots."""
        return Slots(self._slots)

    def _slot(self, x: Tensor) -> Slot:
        self.tensors.append(x)
        if len(self._slots) < len(self.tensors):
            self._slots.append(Slot(len(self._slots)))
        return self._slots[len(self.tensors) - 1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._slot(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
