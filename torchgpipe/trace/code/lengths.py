"""Read the argument `dynamic_shapes` of `sequential`: which lengths of the inputs may change."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

BATCHES = (2, 3, 5)
"""The batch sizes to record: two of them define a line, and the third has to be on the line."""

_FORM = (
    "dynamic_shapes has the form of torch.export, such as "
    "{'tokens': {1: torch.export.Dim('length')}}"
)


class Length(NamedTuple):
    """A length of inputs that may change from call to call, such as that of token sequences.

    One or several dimensions of the inputs have this length.

    Attributes:
        name: The name of its `torch.export.Dim`.
        recorded: The three values of this length for which the calls of a module are recorded.
        least: The smallest length that is allowed.
        most: The largest length that is allowed, or `None`.
    """

    name: str
    recorded: tuple[int, int, int]
    least: int
    most: int | None

    def check(self, length: int) -> None:
        """Raise `ValueError` if this length may not have the value `length`."""
        if length < self.least or (self.most is not None and length > self.most):
            most = "" if self.most is None else f" and at most {self.most}"
            raise ValueError(
                f"the length {self.name} is {length}, but dynamic_shapes allows at least "
                f"{self.least}{most}; give its torch.export.Dim a wider range, and call sequential "
                "again"
            )


Places = dict[int, int]
"""For each dimension of a tensor whose length may change: the index of the size that it has."""


def lengths_of(
    arguments: Mapping[str, Any], shapes: Any
) -> tuple[list[Length], dict[int, list[Places]]]:
    """Find the lengths that may change, and the dimensions of tensors that have these lengths.

    Args:
        arguments: Maps the name of each argument of the module to its value in the sample.
        shapes: The argument `dynamic_shapes` of `sequential`.

    Returns:
        The list of lengths, and a dictionary that says where they are. It maps the id of each
        tensor to a list. The list has a dictionary for each argument that is this tensor: from the
        tensor's dimensions to the indices of their lengths. Indices begin at 1, because 0 stands
        for the batch size.

    Raises:
        TypeError: If `shapes` does not have the form that `torch.export` takes.
        ValueError: If `shapes` does not fit the arguments.
    """
    entries: list[tuple[str, Tensor, dict[int, Any]]] = []
    if isinstance(shapes, Mapping):
        if unknown := sorted(map(str, shapes.keys() - arguments.keys())):
            raise ValueError(
                f"dynamic_shapes names {unknown}, but the sample has {sorted(arguments)}"
            )
        by_name = dict(shapes)
    elif isinstance(shapes, tuple | list):
        if len(shapes) > len(arguments):
            raise ValueError(
                f"dynamic_shapes has {len(shapes)} entries, but the sample has "
                f"{len(arguments)} arguments"
            )
        by_name = dict(zip(arguments, shapes, strict=False))
    else:
        raise TypeError(f"{_FORM}, but got {shapes!r}")
    for name, value in arguments.items():
        entries += _entries(name, value, by_name.get(name))
    dims = _named(entries)
    lengths: list[Length] = []
    for name, places in dims.items():
        lengths.append(_length(name, places, entries))
    by_entry: list[Places] = [{} for _ in entries]
    for size, places in enumerate(dims.values(), 1):
        for k, dimension, _ in places:
            by_entry[k][dimension] = size
    # One tensor can be given for several arguments.
    found: dict[int, list[Places]] = {}
    for (_, x, _), own in zip(entries, by_entry, strict=True):
        found.setdefault(id(x), []).append(own)
    return lengths, found


def _entries(name: str, value: Any, shapes: Any) -> Iterator[tuple[str, Tensor, dict[int, Any]]]:
    """Yield each tensor in an argument, with the entries of `dynamic_shapes` for its dimensions.

    Args:
        name: The name of the argument.
        value: The argument: a tensor, or a tuple, list or dictionary with tensors.
        shapes: The part of `dynamic_shapes` for this argument.
    """
    if isinstance(value, Tensor):
        yield name, value, _by_dimension(name, value, shapes)
    elif type(value) in (tuple, list):
        given = shapes if shapes is not None else [None] * len(value)
        if not isinstance(given, tuple | list) or len(given) != len(value):
            raise TypeError(
                f"dynamic_shapes needs one entry for each element of argument {name}, but got "
                f"{shapes!r}; {_FORM}"
            )
        for each, part in zip(value, given, strict=True):
            yield from _entries(name, each, part)
    elif type(value) is dict:
        if shapes is not None and not isinstance(shapes, Mapping):
            raise TypeError(f"{_FORM}, with a dictionary for {name}, but got {shapes!r}")
        if unknown := sorted(map(str, (shapes or {}).keys() - value.keys())):
            raise ValueError(
                f"dynamic_shapes names {unknown} in {name}, but the sample has {sorted(value)}"
            )
        for key, each in value.items():
            yield from _entries(name, each, (shapes or {}).get(key))
    elif shapes:
        raise ValueError(
            f"dynamic_shapes has {shapes!r} for {name}, which has no lengths: it is neither a "
            "tensor nor a tuple, list or dictionary of tensors"
        )


def _by_dimension(name: str, x: Tensor, shapes: Any) -> dict[int, Any]:
    if shapes is None:
        return {}
    if isinstance(shapes, tuple | list):
        if len(shapes) != x.dim():
            raise ValueError(
                f"dynamic_shapes has {len(shapes)} entries for {name}, which has {x.dim()} "
                "dimensions"
            )
        shapes = dict(enumerate(shapes))
    if not isinstance(shapes, Mapping):
        raise TypeError(f"{_FORM}, but has {shapes!r} for {name}")
    found: dict[int, Any] = {}
    for dimension, entry in shapes.items():
        if not isinstance(dimension, int) or not -x.dim() <= dimension < x.dim():
            raise ValueError(
                f"dynamic_shapes has dimension {dimension!r} of {name}, which has {x.dim()} "
                "dimensions"
            )
        found[dimension % x.dim()] = entry
    return found


Place = tuple[int, int, Any]
"""The index of a tensor, its dimension, and the entry of `dynamic_shapes`."""


def _named(entries: Sequence[tuple[str, Tensor, dict[int, Any]]]) -> dict[str, list[Place]]:
    """Return a dictionary from the name of each length that may change to the dimensions with it.

    A `torch.export.Dim` that is used only for dimension 0 stands for the batch size, and is left
    out.

    Args:
        entries: For each tensor, the name of its argument, the tensor itself, and the entries of
            `dynamic_shapes` for its dimensions.
    """
    dims: dict[str, list[Place]] = {}
    hinted: dict[str, None] = {}  # lengths without a name of their own
    for k, (name, x, by_dimension) in enumerate(entries):
        for dimension, entry in by_dimension.items():
            key = _name(name, x.shape[dimension], entry)
            if key is None:
                continue
            if not isinstance(entry, Dim):
                if dimension == 0:
                    continue
                hinted[key] = None
            dims.setdefault(key, []).append((k, dimension, entry))
    if len(hinted) == 1 and "length" not in dims:
        (key,) = hinted
        dims = {"length" if name == key else name: places for name, places in dims.items()}
    batches = []
    for name, places in dims.items():
        if not any(dimension for _, dimension, _ in places):
            batches.append(name)
    return {name: places for name, places in dims.items() if name not in batches}


def _name(argument: str, length: int, entry: Any) -> str | None:
    """Return the name of a length, or `None` if this length may not change.

    A length is the size of one dimension of a tensor. A `Dim` in `dynamic_shapes` has a name.
    `Dim.DYNAMIC` has none, so that a length of 8, for example, gets the name `length_8`.

    Args:
        argument: The name of the argument that has the tensor.
        length: The length in the sample.
        entry: The entry that `dynamic_shapes` has for this dimension.
    """
    if isinstance(entry, Dim):
        if hasattr(entry, "root"):
            raise TypeError(
                f"dynamic_shapes has {entry.__name__} for {argument}, but a length that is "
                "computed from another Dim is not supported: give Dim('length') for one tensor, "
                "and let the module itself make the tensor that has the other length"
            )
        return str(entry.__name__)
    if type(entry) is type(Dim.DYNAMIC):
        return None if entry.type == Dim.STATIC.type else f"length_{length}"
    if entry in (None, length):
        return None
    raise TypeError(f"{_FORM}, but has {entry!r} for {argument}")


def _length(
    name: str, places: Sequence[Place], entries: Sequence[tuple[str, Tensor, dict[int, Any]]]
) -> Length:
    """Make a `Length` with a given name, and choose three lengths for which to record a module.

    Args:
        name: The name of the length.
        places: The dimensions of tensors that have this length.
        entries: For each tensor, the name of its argument, the tensor itself, and the entries of
            `dynamic_shapes` for its dimensions.

    Raises:
        ValueError: If these dimensions have different lengths in the sample, or the allowed range
            is too small.
    """
    found: dict[int, str] = {}
    least, most = 1, None
    for k, dimension, entry in places:
        argument, x, _ = entries[k]
        found.setdefault(x.shape[dimension], f"dimension {dimension} of {argument}")
        low, high = getattr(entry, "min", None), getattr(entry, "max", None)
        least = max(least, int(low or 0))
        if isinstance(high, int):
            most = high if most is None else min(most, high)
    if len(found) > 1:
        shown = " and ".join([f"{length} in {where}" for length, where in found.items()])
        raise ValueError(
            f"in dynamic_shapes, {name} is one length, but the sample has {shown}; give a sample "
            "in which these dimensions are equal, or give each its own torch.export.Dim"
        )
    (length,) = found
    recorded = _recorded(length, least, most)
    if recorded is None:
        raise ValueError(
            f"sequential has to try three lengths of {name}, but there are too few between {least} "
            f"and {most}: give its torch.export.Dim a wider range"
        )
    known = Length(name, recorded, least, most)
    known.check(length)
    return known


def _recorded(length: int, least: int, most: int | None) -> tuple[int, int, int] | None:
    """Return three lengths for which to record a module: if possible, the sample's length first.

    The other two are shorter if possible, because a module may not take a longer input, for example
    if it has a table of positions. The three lengths differ by a power of two that divides the
    sample's length, because a module may need a multiple of the size of its blocks. Length 1 is
    never chosen, because modules and operators treat it in a special way.

    Args:
        length: The length in the sample.
        least: The smallest allowed length.
        most: The largest allowed length, or `None`.

    Returns:
        The three lengths, or `None` if the allowed range has no three lengths from 2 on.
    """
    step = min(length & -length, 1 << max(0, (length // 4).bit_length() - 1))
    if length - 2 * step >= max(2, least):
        return length, length - step, length - 2 * step
    first = max(length, least, 2)
    if most is None or first + 2 * step <= most:
        return first, first + step, first + 2 * step
    first = max(least, 2)
    return (first, first + 1, first + 2) if first + 2 <= most else None


def shape_at(
    shape: Sequence[int], batched: bool, places: Places, sizes: Sequence[int]
) -> list[int]:
    """Return the shape that an input has for another batch size and other lengths.

    Args:
        shape: The shape of the input in the sample.
        batched: Whether dimension 0 of the input is the batch.
        places: A dictionary from each dimension whose length may change to the index of this length
            in `sizes`.
        sizes: The batch size, and then the lengths that may change.
    """
    found = list(shape)
    if batched:
        found[0] = sizes[0]
    for dimension, k in places.items():
        found[dimension] = sizes[k]
    return found


def with_lengths(x: Tensor, places: Places, sizes: Sequence[int]) -> Tensor:
    """Cut an input, or repeat its contents, so that it has other lengths.

    Args:
        x: The input.
        places: A dictionary from each dimension whose length may change to the index of its new
            length in `sizes`.
        sizes: The batch size, which this function ignores, and then the new lengths.
    """
    for dimension, k in places.items():
        chosen = torch.arange(sizes[k], device=x.device) % x.shape[dimension]
        x = x.index_select(dimension, chosen)
    return x
