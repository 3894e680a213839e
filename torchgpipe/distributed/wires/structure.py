"""Describe a structure of tensors, such as a dictionary, so that another rank can make it anew."""

from collections.abc import Hashable, Sequence
from typing import Any

from torchgpipe.trace.parts import Slot, Slots, Structure

_VALUES = {type(None): "None", bool: "bool", int: "int", float: "float", str: "str"}
_SEQUENCES: dict[str, type[list[Any] | tuple[Any, ...]]] = {"list": list, "tuple": tuple}

Described = tuple[Hashable, ...]
"""What a structure consists of: a word for its kind, and then its parts."""


def described(value: Any) -> Described:
    """Describe a structure in plain values; it has slots (placeholders) in place of its tensors.

    Each value is described with its class, because 1 and True, for example, count as equal.

    Raises:
        TypeError: If the structure has something else than tuples, lists, dictionaries, tensors,
            numbers, strings and `None`.
    """
    kind = type(value)
    if kind is Slot:
        return "tensor", value.number
    if kind in (list, tuple):
        return kind.__name__, *map(described, value)
    if kind is dict:
        items = [(described(key), described(x)) for key, x in value.items()]
        return "dict", *items
    if kind in _VALUES:
        return _VALUES[kind], value
    raise TypeError(
        f"a layer returned a {kind.__name__} in a structure for another rank; return only tuples, "
        "lists, dictionaries, tensors, numbers and strings"
    )


def structure_of(told: Described) -> Structure:
    """Return the structure that `described` has described."""
    slots: list[Slot] = []
    value = _undescribed(told, slots)
    return Structure(value, Slots(slots))


def _undescribed(told: Sequence[Any], slots: list[Slot]) -> Any:
    """Make a value from its description; add its slots (placeholders of tensors) to `slots`."""
    kind, *parts = told
    if kind == "tensor":
        slots.append(Slot(parts[0]))
        return slots[-1]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([_undescribed(part, slots) for part in parts])
    if kind == "dict":
        return {_undescribed(key, slots): _undescribed(x, slots) for key, x in parts}
    return parts[0]
