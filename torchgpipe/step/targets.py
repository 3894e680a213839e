"""Split the target of a mini-batch into the targets of its micro-batches."""

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torchgpipe.caught import how_many
from torchgpipe.tensors.microbatch import UNCOUNTED, MicroBatches, together
from torchgpipe.trace.parts import tensors_in

Values = Sequence[Any]


def parted(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Split the target of a mini-batch; return the target of each micro-batch.

    Tensors and NumPy arrays are split along dimension 0, also if they are nested in mappings,
    tuples, lists and dataclasses. A list or tuple that has an entry for each sample, such as a
    dictionary for each image, is split into shorter lists or tuples. Any other value is given to
    every micro-batch as it is. `MicroBatches` are not split, because they already have a target for
    each micro-batch.

    Args:
        target: The target of the mini-batch, or the `MicroBatches` of targets.
        sizes: The number of samples of each micro-batch.

    Raises:
        ValueError: If dimension 0 of a tensor is not the batch size, if a tensor cannot be split,
            or if there is not one target for each micro-batch.
    """
    if isinstance(target, MicroBatches):
        if len(target) != len(sizes):
            raise ValueError(
                f"the input has {how_many(len(sizes), 'micro-batch')}, but the target has "
                f"{len(target)}; give one target for each micro-batch of the input"
            )
        return [with_tensors(lambda x: x, each) for each in target]
    target = _as_tensor(target)
    if isinstance(target, Tensor):
        return _split(target, sizes)
    if _has_an_entry_for_each_sample(target, sizes):
        bounds = pairwise(accumulate(sizes, initial=0))
        return [target[begin:end] for begin, end in bounds]
    values, make = _taken_apart(target)
    if not values:
        return [target] * len(sizes)
    columns = [parted(x, sizes) for x in values]
    return [make(row) for row in zip(*columns, strict=True)]


def whole(target: Any) -> Any:
    """Return the target of a whole mini-batch for `loss`, with NumPy arrays made into tensors.

    Raises:
        TypeError: If the target is `MicroBatches`.
    """
    if isinstance(target, MicroBatches):
        raise TypeError(
            "loss takes the target of a whole mini-batch, but got MicroBatches; call step or "
            "evaluate, which take MicroBatches"
        )
    return with_tensors(lambda x: x, target)


def sample_counts(targets: Any, sizes: Sequence[int]) -> Sequence[int]:
    """Return how many samples each micro-batch has, or `UNCOUNTED` if dimension 0 does not say it.

    If a micro-batch is a tuple of images, dimension 0 of its tensors is not the batch. Then the
    lengths of the targets are not in proportion to the lengths of dimension 0.

    Args:
        targets: The target that was given to `step`. Only `MicroBatches` of targets are compared
            with `sizes`.
        sizes: The length of dimension 0 of each micro-batch's tensors.
    """
    if not isinstance(targets, MicroBatches) or UNCOUNTED in sizes:
        return sizes
    ratios: set[Fraction] = set()
    for target, size in zip(targets, sizes, strict=True):
        ratios.add(Fraction(_length(target, size), max(size, 1)))
    return sizes if len(ratios) < 2 else [UNCOUNTED] * len(sizes)


def _length(target: Any, size: int) -> int:
    """Return the length of a target that is a tensor or a list; for any other target, `size`.

    For a list of tensors that all have the length `size`, the result is `size`, too.
    """
    if isinstance(target, Tensor) and target.dim():
        return len(target)
    if not isinstance(target, list):
        return size
    tensors = [x for x in target if isinstance(x, Tensor) and x.dim() and len(x) == size]
    return size if len(tensors) == len(target) else len(target)


def with_tensors(function: Callable[[Tensor], Tensor], target: Any) -> Any:
    """Return a copy of a target in which each tensor x is replaced by `function(x)`.

    NumPy arrays of numbers become tensors, too. If nothing in the target changes, the function
    returns the target itself.
    """
    target = _as_tensor(target)
    if isinstance(target, Tensor):
        return function(target)
    values, make = _taken_apart(target)
    return make([with_tensors(function, x) for x in values])


def detached(log: Any) -> Any:
    """Return a copy of a value in which each tensor is detached from its autograd graph.

    Tensors within mappings, lists, tuples and dataclasses are detached, too. If no tensor has a
    graph, return the value itself.
    """
    if isinstance(log, Tensor):
        return log.detach() if log.requires_grad else log
    values, make = _taken_apart(log)
    return make([detached(x) for x in values])


def _taken_apart(target: Any) -> tuple[Values, Callable[[Values], Any]]:
    """Return the values in a container `target`, and a function that replaces them in a copy.

    A container is a mapping, list, tuple or dataclass. If `target` is anything else, the list of
    values is empty. The function takes new values, and returns a copy of the container with them.
    """
    values: Values = ()
    put: Callable[[Values], Any] = list
    if isinstance(target, Mapping):
        values, put = list(target.values()), partial(_with_items, target)
    elif isinstance(target, list):
        values, put = target, list
    elif isinstance(target, tuple):
        values, put = target, lambda row: together(type(target), tuple(row))
    elif dataclasses.is_dataclass(target) and not isinstance(target, type):
        names = [field.name for field in dataclasses.fields(target)]
        values = [getattr(target, name) for name in names]
        put = partial(_with_attributes, target, names)

    def make(row: Values) -> Any:
        changed = any(new is not old for new, old in zip(row, values, strict=True))
        return put(row) if changed else target

    return values, make


def _with_items(mapping: Mapping[Any, Any], values: Values) -> Any:
    """Return a copy of a mapping with the same keys and the given values.

    The copy of a `dict` or `UserDict` has the same class. The copy of any other mapping is a
    `dict`.
    """
    items = zip(mapping, values, strict=True)
    if not isinstance(mapping, dict | UserDict):
        return dict(items)
    copied = copy.copy(mapping)
    for key, value in items:
        copied[key] = value
    return copied


def _with_attributes(target: Any, names: Sequence[str], values: Values) -> Any:
    """Return a copy of a dataclass object in which the fields `names` have the given values.

    The constructor is not called, because it may check or change the values.
    """
    copied = copy.copy(target)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)
    return copied


def _split(target: Tensor, sizes: Sequence[int]) -> list[Any]:
    if len(sizes) == 1:
        return [target]
    if UNCOUNTED in sizes:
        raise ValueError(
            "the target cannot be split, because the input tensors of a micro-batch differ in "
            "dimension 0; give the target of each micro-batch: MicroBatches([...])"
        )
    if target.is_nested or target.layout is not torch.strided:
        raise ValueError(
            "a nested or sparse tensor in the target cannot be split; give the target of each "
            "micro-batch: MicroBatches([...])"
        )
    if not target.dim() or len(target) != sum(sizes):
        raise ValueError(
            f"every tensor of the target needs the batch size, {sum(sizes)}, as its dimension 0, "
            f"but one has the shape {tuple(target.shape)}; a value that is the same for all "
            "samples can be a Python number, or a variable that the criterion closes over"
        )
    return list(target.split([*sizes]))


def _as_tensor(target: Any) -> Any:
    """Return a NumPy array of numbers as a tensor, and any other value as it is."""
    if isinstance(target, Tensor) or not _is_array(target) or target.dtype.kind not in "biufc":
        return target
    # PyTorch takes neither another byte order nor a negative stride, as of `array[::-1]`.
    native = target.dtype.newbyteorder("=")
    if target.dtype != native or min(target.strides, default=0) < 0:
        target = target.astype(native, order="C")
    return torch.as_tensor(target)


def _is_array(x: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _has_an_entry_for_each_sample(target: Any, sizes: Sequence[int]) -> bool:
    """Return whether a target is a list, tuple or array with an entry for each sample.

    It has to have as many entries as there are samples. But a list of numbers does not count,
    because it can be a list of class weights that has this length by chance. Tensors in a tuple do
    not count either if dimension 0 of all of them is the batch size: each tensor then belongs to
    the whole mini-batch.

    Raises:
        ValueError: The target is a list of tensors or a tuple of structures such as dictionaries,
            with as many entries as there are samples, and dimension 0 of all tensors is as long.
            So each entry can belong to one sample, or to the whole mini-batch.
    """
    samples = sum(sizes)
    if len(sizes) == 1 or UNCOUNTED in sizes:
        return False
    if _is_array(target):
        return bool(target.ndim) and len(target) == samples
    if not isinstance(target, list) and type(target) is not tuple:
        return False
    if len(target) != samples or any(isinstance(x, bool | int | float) for x in target):
        return False
    tensors = [x for x in target if isinstance(x, Tensor)]
    by_entry = not _all_have(samples, tensors)
    if not by_entry and isinstance(target, list) and len(tensors) == samples:
        raise ValueError(
            f"the target is a list of {samples} tensors, each with {samples} entries, for "
            f"{samples} samples, so it can be split in two ways; if each tensor has an entry for "
            "each sample, give a tuple; if each tensor belongs to a sample, give MicroBatches"
        )
    if not tensors and type(target) is tuple and _all_have(samples, tensors_in(target)):
        raise ValueError(
            f"the target is a tuple of {samples} structures (the first is a "
            f"{type(target[0]).__name__}) for {samples} samples, and each of their tensors has "
            f"{samples} entries, so it can be split in two ways; if each structure belongs to a "
            "sample, give a list; if each tensor has an entry for each sample, give MicroBatches"
        )
    return by_entry


def _all_have(entries: int, tensors: Iterable[Tensor]) -> bool:
    """Return whether there are tensors, and dimension 0 of each of them has so many entries."""
    lengths = {len(x) if x.dim() else 0 for x in tensors}
    return lengths == {entries}
