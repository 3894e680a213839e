"""The tensors in a structure, such as a dictionary or a dataclass: find them, take them out, put others back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, dictionaries and dataclasses, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_in(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors_in(x)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


@dataclass
class Slot:
    """The place of a tensor in a structure. Two recordings are compared by its number."""

    number: int = -1  # older pickles have none

    def __repr__(self) -> str:
        return "Tensor"


class Slots:
    """The tensors that are taken out of structures; a slot is left in the place of each."""

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
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
        with _Taking(self):
            return copy.deepcopy(value)

    def put_back(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of `value` with tensors in place of the slots."""
        if isinstance(value, Slot):
            return next(x for slot, x in zip(self._slots, tensors, strict=True) if slot is value)
        if type(value) in (tuple, list):
            return type(value)(self.put_back(x, tensors) for x in value)
        if type(value) is dict:
            return {key: self.put_back(x, tensors) for key, x in value.items()}
        return copy.deepcopy(value, {id(slot): x for slot, x in zip(self._slots, tensors, strict=True)})

    def again(self) -> Slots:
        """Return a copy without tensors, which leaves the same slots."""
        return Slots(self._slots)

    def _slot(self, x: Tensor) -> Slot:
        self.tensors.append(x)
        if len(self._slots) < len(self.tensors):
            self._slots.append(Slot(len(self._slots)))
        return self._slots[len(self.tensors) - 1]


class _Taking(TorchFunctionMode):
    """Let `copy.deepcopy` leave slots in place of tensors, whatever holds them."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._slots._slot(args[0])
        return func(*args, **(kwargs or {}))
