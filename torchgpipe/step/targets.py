"""Split the target of a mini-batch into the targets of its micro-batches."""

import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchgpipe.tensors.microbatch import UNCOUNTED, MicroBatches, together


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the part of a target for each micro-batch.

    - Tensors and NumPy arrays are split along dimension 0, also if they are nested in mappings,
      tuples, lists and dataclasses.
    - A list with one entry for each sample, such as one dictionary for each image, is split into
      shorter lists, unless it has tensors of the batch size.
    - `MicroBatches` are taken as they are.
    - Any other value is given to every micro-batch.

    Args:
        target: The target of the mini-batch, or the `MicroBatches` of targets.
        sizes: The number of samples of each micro-batch.

    Raises:
        ValueError: Dimension 0 of a tensor is not the batch size, or there is another number of
            targets than of micro-batches.
    """
    if isinstance(target, MicroBatches):
        if len(target) != len(sizes):
            raise ValueError(
                f"the input has {len(sizes)} micro-batches, but the target has {len(target)}; give "
                "a target for each micro-batch of the input"
            )
        return list(target)
    if _is_array(target) and target.dtype.kind in "biufc":  # numbers
        target = torch.as_tensor(target)
    if isinstance(target, Tensor):
        return _split(target, sizes)
    if _is_array(target) or _has_an_entry_for_each_sample(target, sizes):
        bounds = pairwise(accumulate(sizes, initial=0))
        return [target[begin:end] for begin, end in bounds]
    values, make = _taken_apart(target)
    if not values:
        return [target] * len(sizes)
    columns = [parted(x, sizes) for x in values]
    return [make(row) for row in zip(*columns, strict=True)]


def with_tensors(function: Callable[[Tensor], Tensor], target: Any) -> Any:
    """Return a copy of the target in which `function` has replaced each tensor."""
    if isinstance(target, Tensor):
        return function(target)
    values, make = _taken_apart(target)
    if not values:
        return target
    return make(tuple([with_tensors(function, x) for x in values]))


def _taken_apart(target: Any) -> tuple[Sequence[Any], Callable[[tuple[Any, ...]], Any]]:
    """Return the values in a container, and a function that makes such a container of new values.

    If `target` is not a container, return no values.
    """
    if isinstance(target, Mapping):
        # Not only dictionaries: what a tokenizer returns is a `UserDict`.
        kind: Any = type(target) if isinstance(target, UserDict) else dict
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
    if UNCOUNTED in sizes:
        raise ValueError(
            "the target cannot be split, because the tensors of a micro-batch differ in dimension "
            "0; give the target of each micro-batch: MicroBatches([...])"
        )
    if not target.dim() or len(target) != sum(sizes):
        raise ValueError(
            f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension 0, "
            f"but one has the shape {tuple(target.shape)}"
        )
    return list(target.split([*sizes]))


def _is_array(x: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _has_an_entry_for_each_sample(target: object, sizes: Sequence[int]) -> bool:
    """Return whether a target is a list that has to be split by its entries.

    Two kinds of lists are as long as the batch by chance, and are not split by entries: a list of
    numbers (such as class weights), and a list with a tensor whose dimension 0 is the batch.
    """
    samples = sum(sizes)
    if not isinstance(target, list) or len(target) != samples or len(sizes) == 1:
        return False
    whole = [isinstance(x, Tensor) and x.dim() > 0 and len(x) == samples for x in target]
    if any(whole):
        return False  # tensors for the whole mini-batch
    return all(isinstance(x, Mapping | list | tuple | str | Tensor) for x in target)
