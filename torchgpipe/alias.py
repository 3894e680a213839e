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

__all__ = ["Shared", "check_unchanged", "shared_by", "versions"]

Shared = tuple[bool, ...]
"""Which of the tensors beside it share memory with another tensor of the same micro-batch."""


def shared_by(outputs: Sequence[Tensor | None], inputs: Sequence[Tensor | None] = (), shared: Shared = ()) -> Shared:
    """Return which outputs of a task share memory with each other, or are inputs that share memory with others."""
    if len(outputs) == 1 and True not in shared:
        return (False,)
    storages = [None if y is None else storage_of(y) for y in outputs]
    times = Counter(storages)
    before = {storage_of(x) for x, s in zip(inputs, shared, strict=False) if s and x is not None}
    return tuple([s is not None and (times[s] > 1 or s in before) for s in storages])


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return how often each tensor was changed in place; `None` where that is not counted."""
    return [None if x is None or x.is_inference() else x._version for x in tensors]


def check_unchanged(partition: int, before: list[int | None], inputs: Sequence[Tensor | None], shared: Shared) -> None:
    """Raise `RuntimeError` if a task has changed an input in place that shares memory with another tensor."""
    for old, new, twice in zip(before, versions(inputs), shared, strict=True):
        if twice and old != new:
            raise RuntimeError(
                f"partition {partition} changed an input in place that shares memory with another tensor under way: a "
                "skip, or another input; the two would get different values or gradients on two partitions, so make "
                "the layer that changes it out-of-place (inplace=False), or hand on a copy (x.clone())"
            )
