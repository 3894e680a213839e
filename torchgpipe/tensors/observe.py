"""Observers: functions that return a context in which a task runs, such as a timer's context."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torchgpipe.schedules.action import Kind as Kind


class Task(NamedTuple):
    """One piece of work on a micro-batch in a partition, such as a forward or a copy.

    An observer, such as a timer, gets a `Task` object before the work begins. A copy moves all
    tensors, or all gradients, that one task sends to another device. The `partition` of a copy is
    the partition that sends.
    """

    kind: Kind
    micro_batch: int
    partition: int


Observer = Callable[[Task], AbstractContextManager[object]]
"""A function that returns a context for a task; the thread that runs the task enters it."""

NOTHING = nullcontext()
"""A context that does nothing. All tasks without an observer share it, which saves time."""


def observed(
    observer: Observer | None, kind: Kind, i: int, j: int
) -> AbstractContextManager[object]:
    """Return the context in which a task runs, so that an observer can note its start and end.

    Without an observer, the context does nothing.

    Args:
        observer: The observer of the mini-batch, or `None`.
        kind: The kind of the task, such as "forward".
        i: The index of the task's micro-batch.
        j: The index of the task's partition; for a copy, of the partition that sends.
    """
    if observer is None:
        return NOTHING
    return observer(Task(kind, i, j))
