"""Tensors that share memory, which a partition must not change in place.

Layers without a pipeline may hand on one tensor in two ways: as an output and as a skip, or twice in a tuple. If a
later layer changes one of the two in place, the other changes with it, and their gradients, too. Between partitions
the two go ways of their own, so that a change of one would be missing from the other. Such a change is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from torchgpipe._autograd import storage_of

Shared = tuple[bool, ...]
"""Which of the tensors beside it share memory with another tensor of the same micro-batch."""


def shared_by(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None] = (),
    shared: Shared = (),
    held: frozenset[int] = frozenset(),
) -> Shared:
    """Return which outputs of a task share memory: with each other, or with what its layers hold.

    `held` are the storages of its layers' parameters and buffers. Inputs that are `shared` and handed on stay so.
    """
    if len(outputs) == 1 and True not in shared:
        return (bool(held) and outputs[0] is not None and storage_of(outputs[0]) in held,)
    storages = [None if y is None else storage_of(y) for y in outputs]
    times = Counter(storages)
    before = held | {storage_of(x) for x, s in zip(inputs, shared, strict=False) if s and x is not None}
    return tuple([s is not None and (times[s] > 1 or s in before) for s in storages])


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return how often each tensor was changed in place; `None` where that is not counted."""
    return [None if x is None or x.is_inference() else x._version for x in tensors]


def check_handed_on(partition: int, before: list[int | None], tensors: Sequence[Tensor | None]) -> None:
    """Raise `RuntimeError` if a tensor was changed in place since it was handed on to `partition`."""
    if versions(tensors) != before:
        raise RuntimeError(
            f"an input of partition {partition} was changed in place before the partition took it: a layer returns "
            "memory that it uses again (a buffer) for the next micro-batch; return a copy (x.clone())"
        )


def check_unchanged(partition: int, before: list[int | None], inputs: Sequence[Tensor | None], shared: Shared) -> None:
    """Raise `RuntimeError` if a task has changed an input in place that shares memory with another tensor."""
    for old, new, twice in zip(before, versions(inputs), shared, strict=True):
        if twice and old != new:
            raise RuntimeError(
                f"partition {partition} changed an input in place that shares memory with another tensor under way: a "
                "skip, or another input; the two would get different values or gradients on two partitions, so make "
                "the layer that changes it out-of-place (inplace=False), or hand on a copy (x.clone())"
            )


def unshared(outputs: tuple[Tensor, ...], shared: Shared, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the pipeline's outputs such that they share memory neither with each other nor with its inputs.

    Where there are several micro-batches, concatenation makes copies anyway.
    """
    given = {storage_of(x) for x in inputs if x is not None}
    return tuple([y.clone() if s or storage_of(y) in given else y for y, s in zip(outputs, shared, strict=True)])
