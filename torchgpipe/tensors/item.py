"""Items: what one task hands to another, a micro-batch or a skip, and whether it shares memory.

A layer may hand on one tensor in two ways: as an output and as a skip, or twice in a tuple. Without a pipeline, if a
later layer changes one of the two in place, the other changes with it. Between partitions the two are copied apart, so
that the other would not change. So such a change is refused.
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
"""Which of the tensors beside it share memory with another tensor of the same micro-batch."""


@dataclass(slots=True)
class Item:
    """Tensors on their way from one task to another: those of a micro-batch of this form, then its skips.

    The graph engine has the streams to wait for, `fence`, and a tensor that orders backward, `tie`. `versions` is how
    often each had been changed in place when it was handed on.
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
        return Item(
            self.flat + skip.flat, self.form, self.shared + skip.shared, self.fence, self.tie
        )

    def parted(self) -> tuple[Item, Item]:
        """Return the micro-batch without its last skip, and that skip."""
        rest = Item(self.flat[:-1], self.form, self.shared[:-1], self.fence, self.tie)
        return rest, Item(self.flat[-1:], Tensor, self.shared[-1:], self.fence)

    def check_handed_on(self, partition: int) -> None:
        """Raise `RuntimeError` if a tensor was changed in place since it was handed on to `partition`."""
        if versions(self.flat) != self.versions:
            raise RuntimeError(
                f"an input of partition {partition} was changed in place before the partition took it: a layer returns "
                "memory that it uses again (a buffer) for the next micro-batch; return a copy (x.clone())"
            )


def shared_by(
    outputs: Flat, inputs: Flat = (), shared: Shared = (), held: frozenset[int] = frozenset()
) -> Shared:
    """Return which outputs of a task share memory: with each other, or with what its layers hold.

    `held` are the storages of its layers' parameters and buffers. An input that is `shared` stays so as an output.
    """
    if len(outputs) == 1 and True not in shared:
        return (bool(held) and outputs[0] is not None and storage_of(outputs[0]) in held,)
    storages = [None if y is None else storage_of(y) for y in outputs]
    times = Counter(storages)
    before = held | {
        storage_of(x) for x, s in zip(inputs, shared, strict=False) if s and x is not None
    }
    return tuple([s is not None and (times[s] > 1 or s in before) for s in storages])


def versions(tensors: Flat) -> list[int | None]:
    """Return how often each tensor was changed in place; `None` where that is not counted."""
    try:
        return [None if x is None else x._version for x in tensors]
    except RuntimeError:  # of an inference tensor; to ask each of them would take longer
        return [None if x is None or x.is_inference() else x._version for x in tensors]


def unshared(outputs: Flat, shared: Shared, inputs: Sequence[Tensor | None]) -> Flat:
    """Return the pipeline's outputs such that they share memory neither with each other nor with its inputs.

    Where there are several micro-batches, concatenation makes copies anyway.
    """
    given = {storage_of(x) for x in inputs if x is not None}
    copied = (
        y is not None and (s or storage_of(y) in given)
        for y, s in zip(outputs, shared, strict=True)
    )
    return tuple(
        [
            carrying(y.clone(), y) if y is not None and c else y
            for y, c in zip(outputs, copied, strict=True)
        ]
    )
