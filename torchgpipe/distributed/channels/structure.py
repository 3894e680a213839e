"""Describe a structure of tensors, such as a dictionary, so that another rank can make it anew."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from torchgpipe.trace.parts import Slot, Slots, Structure

_SEQUENCES: dict[type[Any], str] = {tuple: "tuple", list: "list", torch.Size: "Size"}
_MADE_BY = {name: kind for kind, name in _SEQUENCES.items()}
_VALUES = (type(None), bool, int, float, str)

Described = tuple[Hashable, ...]
"""What a structure consists of: a word for its kind, and then its parts."""


def described(value: Any, values: list[Any]) -> Described:
    """Describe a structure that has slots (placeholders) in place of its tensors.

    Micro-batches usually have structures with the same description: only their plain values, such
    as numbers, may differ.

    Args:
        value: The structure, or a part of it.
        values: A list to which the plain values are added, in their order.

    Raises:
        TypeError: If the structure has something else than tuples, lists, dictionaries, tensors,
            numbers, strings and `None`.
    """
    kind = type(value)
    if kind is Slot:
        return "tensor", value.number
    if kind in _VALUES:
        values.append(value)
        return ("value",)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind], *[described(part, values) for part in value]
    if kind is dict:
        # Names are a part of the description, because they are usually the same in all
        # micro-batches. (Plain values are sent with each micro-batch, and a receiver on a GPU has
        # to wait for them.)
        plain = all(type(key) is str for key in value)
        items = []
        for key, x in value.items():
            items.append((key if plain else described(key, values), described(x, values)))
        return "dict" if plain else "dict of any keys", *items
    raise TypeError(
        f"a layer returned a {kind.__name__} in a structure for another rank; return only tuples, "
        "lists, dictionaries, tensors, numbers and strings"
    )


def structure_of(told: Described, values: list[Any]) -> Structure:
    """Make a structure from its description `told`, the result of `described`.

    The list `values` has the plain values, such as numbers, because the description lacks them.
    """
    slots: list[Slot] = []
    value = _undescribed(told, iter(values), slots)
    return Structure(value, Slots(slots))


def _undescribed(told: Any, values: Iterator[Any], slots: list[Slot]) -> Any:
    """Make a structure, or a part of it, from its description.

    Args:
        told: The description, a result of `described`.
        values: Yields the plain values, such as numbers, which are not in the description.
        slots: A list to which a slot (placeholder) is added for each tensor.
    """
    kind, *parts = told
    if kind == "tensor":
        slots.append(Slot(parts[0]))
        return slots[-1]
    if kind == "value":
        return next(values)
    if kind in _MADE_BY:
        return _MADE_BY[kind]([_undescribed(part, values, slots) for part in parts])
    made = {}
    for key, x in parts:
        name = key if kind == "dict" else _undescribed(key, values, slots)
        made[name] = _undescribed(x, values, slots)
    return made
