"""Take the input of a pipeline apart: the tensors in a mapping, a dataclass or a nested tuple."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from torchgpipe.tensors.microbatch import MicroBatches, Structured, is_flat, refuse_array
from torchgpipe.trace.parts import Slots, as_tensors, tensors_in


def taken_apart(input: Any) -> Any:
    """Return an input that has tensors within a structure as `Structured` tensors.

    A structure is a mapping, a dataclass, or a tuple that has other values than tensors. The first
    layer gets the same structure for each micro-batch: its tensors are split, and all other values
    are copied. Any other input is returned as it is.

    Raises:
        TypeError: If a structure has no tensors, or has lists, arrays, `MicroBatches`, or other
            objects that have tensors.
    """
    if isinstance(input, MicroBatches):
        return MicroBatches([taken_apart(each) for each in input])
    if is_flat(input) or not _is_structure(input):
        return input
    _check_parts(input, "input")
    found = as_tensors(input)
    if not isinstance(found, Structured):
        raise TypeError(f"input must have tensors, but got {type(input).__name__} without any")
    if len(found) != len([*tensors_in(input)]):
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
                f"{place} is MicroBatches; give MicroBatches of whole inputs, each with a part of "
                f"{where}"
            )
        if isinstance(part, list):
            raise TypeError(
                f"{place} is a list, which can have an entry for each sample; make a tensor of it, "
                "or give MicroBatches"
            )
        if _is_structure(part):
            _check_parts(part, place)


def check_sample(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `TypeError` if there is no tensor in the arguments, for example only a shape.

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
