"""Observe tasks: a context around each task, for timelines, memory counts and utilization."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torchgpipe.schedules.action import Kind as Kind


class Task(NamedTuple):
    """One piece of work on a micro-batch in a partition, such as a forward or a copy.

    A copy moves all tensors, or all gradients, that go from one task to one other device. It
    belongs to the partition that sends them.
    """

    kind: Kind
    micro_batch: int
    partition: int


Observer = Callable[[Task], AbstractContextManager[object]]
"""A function that returns a context for a task; the thread that runs the task enters it."""

NOTHING = nullcontext()
"""A context that does nothing. It is made only once, because it is entered for every task."""


def observed(
    observer: Observer | None, kind: Kind, i: int, j: int
) -> AbstractContextManager[object]:
    """Return the observer's context for a task, or without an observer `NOTHING`."""
    if observer is None:
        return NOTHING
    return observer(Task(kind, i, j))
