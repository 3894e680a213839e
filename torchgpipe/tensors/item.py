"""Items: the tensors that one task passes to another task, and whether these share memory.

A layer can return the same tensor twice: as an output and as a skip, or twice in a tuple. Suppose
that a later layer changes one of these two outputs in place. Without a pipeline, the other output
changes, too. But a pipeline copies both separately to the next device, so the other output would
not change. To avoid such different results, the pipeline raises an error.
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
"""For each tensor, whether it shares memory with another tensor of the same micro-batch."""


@dataclass(slots=True)
class Item:
    """The tensors that one task passes to another task.

    Attributes:
        flat: The tensors of a micro-batch, then its skips.
        form: The form of the micro-batch.
        shared: For each tensor, whether it shares memory with another tensor.
        fence: The fence of the task that made the tensors. The fence makes a copy of the tensors
            wait for the task's GPU stream; only the graph engine uses it.
        tie: A tensor that makes an extra edge in the graph, so that tasks run in the right order in
            backward; only the graph engine uses it.
        versions: The version counter of each tensor at the time when the item was made. If a
            counter changes later, the tensor was changed in place.
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
        """Return an item that has the tensors of this item, and one more skip.

        Args:
            skip: The item of the skip.
            partition: The index of the partition that gets the tensors, for the error message.

        Raises:
            RuntimeError: If the skip was changed in place after its item was made.
        """
        skip.check_handed_on(partition)
        flat = self.flat + skip.flat
        shared = self.shared + skip.shared
        return Item(flat, self.form, shared, self.fence, self.tie)

    def parted(self) -> tuple[Item, Item]:
        """Split this item: return an item without the last skip, and an item of this skip only."""
        rest = Item(self.flat[:-1], self.form, self.shared[:-1], self.fence, self.tie)
        skip = Item(self.flat[-1:], Tensor, self.shared[-1:], self.fence)
        return rest, skip

    def check_handed_on(self, partition: int) -> None:
        """Raise `RuntimeError` if a tensor was changed in place after this item was made.

        Args:
            partition: The index of the partition that gets the tensors, for the error message.
        """
        if versions(self.flat) != self.versions:
            raise RuntimeError(
                f"an input of partition {partition} was changed in place before the partition took "
                "it: a layer returns a tensor, such as a buffer, and uses its memory again for the "
                "next micro-batch; return a copy (x.clone())"
            )


def shared_by(
    outputs: Flat, inputs: Flat = (), shared: Shared = (), held: frozenset[int] = frozenset()
) -> Shared:
    """Return for each output of a task whether another tensor uses the same memory.

    The other tensor can be another output, or a parameter or buffer of the task's layers.

    Args:
        outputs: The outputs of the task.
        inputs: The inputs of the task.
        shared: For each input, whether it shares memory with another tensor. If a layer returns
            an input that shares memory, this output shares memory, too.
        held: The storages of the parameters and buffers of the task's layers, as numbers from
            `storage_of`.
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
    """Return each tensor's version counter, which PyTorch increases at each in-place change.

    For a tensor without such a counter, and for an entry that is `None`, the result has `None`.
    """
    try:
        return [None if x is None else x._version for x in tensors]
    except RuntimeError:
        # An inference tensor has no count. It takes longer to ask each tensor beforehand.
        return [None if x is None or x.is_inference() else x._version for x in tensors]


def unshared(outputs: Flat, shared: Shared, inputs: Sequence[Tensor | None]) -> Flat:
    """Return the pipeline's outputs, with copies in place of those tensors that share memory.

    Thanks to the copies, the caller can change an output in place without changing another tensor.
    This function is needed only if a mini-batch has a single micro-batch: the outputs of several
    micro-batches are concatenated, which copies them.

    Args:
        outputs: The outputs of the last partition.
        shared: For each output, whether it shares memory with another tensor.
        inputs: The inputs of the pipeline. Outputs that share memory with an input are copied, too.
    """
    given = {storage_of(x) for x in inputs if x is not None}
    copied: list[Tensor | None] = []
    for y, shares in zip(outputs, shared, strict=True):
        if y is not None and (shares or storage_of(y) in given):
            y = carrying(y.clone(), y)
        copied.append(y)
    return tuple(copied)
