"""Targets: each micro-batch has its part."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchgpipe.tensors.microbatch import together


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return each micro-batch's part of a target.

    Tensors and NumPy arrays are split by samples, in mappings, tuples, lists and dataclasses, as
    deep as these go. A list with one entry for each sample, such as a dictionary for each image, is
    split by its entries. Everything else is for all micro-batches.

    Args:
        target: The target of the mini-batch.
        sizes: How many samples each micro-batch has.

    Raises:
        ValueError: A tensor has another batch size (dimension 0), or a list can be split in two
            ways.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        target = torch.as_tensor(target)
    if isinstance(target, Tensor):
        return _split(target, sizes)
    if isinstance(target, list) and _has_an_entry_for_each_sample(target, sum(sizes)):
        bounds = pairwise(accumulate(sizes, initial=0))
        return [target[begin:end] for begin, end in bounds]
    values, make = _taken_apart(target)
    if not values:
        return [target] * len(sizes)
    columns = [parted(x, sizes) for x in values]
    return [make(row) for row in zip(*columns, strict=True)]


def with_tensors(function: Callable[[Tensor], Tensor], target: Any) -> Any:
    """Return a target like this one, with what `function` makes of each of its tensors."""
    if isinstance(target, Tensor):
        return function(target)
    values, make = _taken_apart(target)
    if not values:
        return target
    return make(tuple([with_tensors(function, x) for x in values]))


def _taken_apart(target: Any) -> tuple[Sequence[Any], Callable[[tuple[Any, ...]], Any]]:
    """Return the values in a target, and what makes a target like it of other values."""
    if isinstance(target, Mapping):
        # Not only dictionaries: what a tokenizer returns is a `UserDict`.
        kind: Any = dict if isinstance(target, dict) else type(target)
        return list(target.values()), lambda row: kind(dict(zip(target, row, strict=True)))
    if isinstance(target, list):
        return target, list
    if isinstance(target, tuple):
        return target, partial(together, type(target))
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        names = [field.name for field in dataclasses.fields(target) if field.init]
        values = [getattr(target, name) for name in names]
        return values, lambda row: dataclasses.replace(target, **dict(zip(names, row, strict=True)))
    return (), list


def _split(target: Tensor, sizes: Sequence[int]) -> list[Any]:
    if len(sizes) == 1:
        return [target]
    if not target.dim() or len(target) != sum(sizes):
        raise ValueError(
            f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension 0, "
            f"but one has the shape {tuple(target.shape)}"
        )
    return list(target.split([*sizes]))


def _has_an_entry_for_each_sample(target: list[Any], samples: int) -> bool:
    if len(target) != samples or samples < 2:
        return False
    whole = [isinstance(x, Tensor) and x.dim() > 0 and len(x) == samples for x in target]
    if all(whole):
        raise ValueError(
            f"a target of {samples} tensors, each of which has the batch size {samples}, can be "
            "split in two ways; give a tuple of tensors to split each of them, or stack a list "
            "that has an entry for each sample"
        )
    return True
