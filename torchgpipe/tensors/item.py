"""Items: the tensors that one task hands to another task, and whether they share memory.

A layer may hand on the same tensor in two ways: as an output and as a skip, or twice in a tuple.
Without a pipeline, if a later layer changes one of the two in place, the other one changes, too.
Between partitions the two are copied apart, and the other one would not change. So such a change is
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchgpipe.tensors._autograd import storage_of
from torchgpipe.tensors.copy import NO_FENCE, StreamFence
from torchgpipe.tensors.microbatch import Flat, Form, carrying

Shared = tuple[bool, ...]
"""Whether each of some tensors shares memory with another tensor of the same micro-batch."""


@dataclass(slots=True)
class Item:
    """Tensors on their way from one task to another.

    Attributes:
        flat: The tensors of a micro-batch, then its skips.
        form: The form of the micro-batch.
        shared: Whether each tensor shares memory with another tensor.
        fence: The CUDA streams to wait for; only the graph engine has them.
        tie: A tensor that orders backward; only the graph engine has one.
        versions: How often each tensor had been changed in place when the item was handed on.
    """

    flat: Flat
    form: Form
    shared: Shared
    fence: StreamFence = NO_FENCE
    tie: Tensor | None = None
    versions: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = versions(self.flat)

    def with_skip(self, skip: Item, partition: int) -> Item:
        """Return the micro-batch with one more skip, which `partition` takes."""
        skip.check_handed_on(partition)
        flat = self.flat + skip.flat
        shared = self.shared + skip.shared
        return Item(flat, self.form, shared, self.fence, self.tie)

    def parted(self) -> tuple[Item, Item]:
        """Return the micro-batch without its last skip, and that skip."""
        rest = Item(self.flat[:-1], self.form, self.shared[:-1], self.fence, self.tie)
        skip = Item(self.flat[-1:], Tensor, self.shared[-1:], self.fence)
        return rest, skip

    def check_handed_on(self, partition: int) -> None:
        """Raise `RuntimeError` if a tensor was changed in place after it was handed on."""
        if versions(self.flat) != self.versions:
            raise RuntimeError(
                f"an input of partition {partition} was changed in place before the partition took "
                "it: a layer returns memory that it uses again (a buffer) for the next "
                "micro-batch; return a copy (x.clone())"
            )


def shared_by(
    outputs: Flat, inputs: Flat = (), shared: Shared = (), held: frozenset[int] = frozenset()
) -> Shared:
    """Return whether each output of a task shares memory with another output or with its layers.

    Args:
        outputs: The outputs of the task.
        inputs: The inputs of the task.
        shared: Whether each input shares memory. If a layer returns such an input, the output
            still does.
        held: The storages of the parameters and buffers of the task's layers.
    """
    if len(outputs) == 1 and True not in shared:
        (y,) = outputs
        return (bool(held) and y is not None and storage_of(y) in held,)
    before = set(held)
    for x, shares in zip(inputs, shared, strict=False):
        if shares and x is not None:
            before.add(storage_of(x))
    storages = [None if y is None else storage_of(y) for y in outputs]
    times = Counter(storages)
    found = []
    for storage in storages:
        shares = storage is not None and (times[storage] > 1 or storage in before)
        found.append(shares)
    return tuple(found)


def versions(tensors: Flat) -> list[int | None]:
    """Return how often each tensor was changed in place, or `None` where PyTorch does not count."""
    try:
        return [None if x is None else x._version for x in tensors]
    except RuntimeError:
        # An inference tensor has no count. To ask each tensor beforehand would take longer.
        return [None if x is None or x.is_inference() else x._version for x in tensors]


def unshared(outputs: Flat, shared: Shared, inputs: Sequence[Tensor | None]) -> Flat:
    """Return the pipeline's outputs, in which a tensor that shares memory is replaced by a copy.

    The only micro-batch of a mini-batch needs this. Several micro-batches are concatenated, which
    copies them anyway.

    Args:
        outputs: The outputs of the last partition.
        shared: Whether each output shares memory with another one.
        inputs: The inputs of the pipeline, with which outputs must not share memory either.
    """
    given = {storage_of(x) for x in inputs if x is not None}
    copied: list[Tensor | None] = []
    for y, shares in zip(outputs, shared, strict=True):
        if y is not None and (shares or storage_of(y) in given):
            y = carrying(y.clone(), y)
        copied.append(y)
    return tuple(copied)
