"""Observe tasks: a hook around each one, for timelines, memory counts and utilization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

__all__ = ["Observer", "Task", "observed"]


class Task(NamedTuple):
    """Name one piece of work: `kind` of micro-batch `micro_batch` on partition `partition`."""

    kind: Literal["forward", "recompute", "backward"]
    micro_batch: int
    partition: int


Observer = Callable[[Task], AbstractContextManager[object]]
"""Given a task, return a context manager; it is entered around the task, in the thread that runs it."""

_UNOBSERVED = nullcontext()


def observed(
    observer: Observer | None, kind: Literal["forward", "recompute", "backward"], i: int, j: int
) -> AbstractContextManager[object]:
    """Return what to enter around a task: the observer's context, or nothing at next to no cost."""
    return _UNOBSERVED if observer is None else observer(Task(kind, i, j))
