"""Observe tasks: a hook around each one, for timelines, memory counts and utilization."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torchgpipe.schedules.action import Kind as Kind


class Task(NamedTuple):
    """Name one piece of work: `kind` of micro-batch `micro_batch` on partition `partition`.

    A copy is of all tensors, or gradients, that go from one task to one other device. It belongs to the partition that
    sends them.
    """

    kind: Kind
    micro_batch: int
    partition: int


Observer = Callable[[Task], AbstractContextManager[object]]
"""Given a task, return a context manager; it is entered around the task, in the thread that runs it."""

NOTHING = nullcontext()
"""A context that does nothing, made once: it is entered for every task."""


def observed(
    observer: Observer | None, kind: Kind, i: int, j: int
) -> AbstractContextManager[object]:
    """Return what to enter around a task: the observer's context, or nothing at next to no cost."""
    return NOTHING if observer is None else observer(Task(kind, i, j))
