"""Portals carry a skip past the partitions in between (torchgpipe paper, section 3.3).

A skip that crosses partitions is not part of what a partition hands to the next: the task that stashes it puts
it into a portal, and the task that pops it takes it out. Neither the tasks nor the devices in between see it, no
copy of it is made for them, and the portal lets go of it when it is taken. What a checkpointed task needs for its
recomputation it keeps itself, like any other of its inputs, until its backward.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torchgpipe.skip.scope import SkipKey

T = TypeVar("T")


class Portals(Generic[T]):
    """Hold the skips of one mini-batch that are under way; a slot per micro-batch and skip.

    No lock guards it: the task that puts always precedes, through the chain of tasks between them, the one that
    takes.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, SkipKey], T] = {}

    def put(self, i: int, key: SkipKey, item: T) -> None:
        """Put skip `key` of micro-batch `i` on its way."""
        self._slots[i, key] = item

    def take(self, i: int, key: SkipKey) -> T:
        """Take skip `key` of micro-batch `i` out; the portal keeps nothing."""
        return self._slots.pop((i, key))

    def waiting(self, i: int) -> list[T]:
        """Return the skips of micro-batch `i` that are under way."""
        return [item for (k, _), item in self._slots.items() if k == i]

    def __len__(self) -> int:
        return len(self._slots)
