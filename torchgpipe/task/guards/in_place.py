"""Replace tensors in the layers temporarily, and restore the old tensors afterwards.

Tasks do not compute with the parameters, but with stand-ins: detached parameters. (A task is a
micro-batch on a stage.) So the stand-ins have to be in the layers while a task runs.

What goes wrong without this guard: only tasks know the stand-ins, and a criterion reads a weight of
the layers, for a penalty. The criterion would find the parameter, although the layers use the
stand-in. So the gradient of the penalty would be added to the parameter separately, in the middle
of a step.

Therefore, worker threads and ranks put the stand-ins into the layers for a whole run: all forwards,
all backwards, or a whole step. Then the layers, the criterion and a penalty over
`model.parameters()` all read the same stand-ins. The graph engine puts the stand-ins into the
layers only while a task runs. It does not learn when a backward has failed, so after a failure it
could not remove stand-ins that stay longer.

If two threads ran the same layers at the same time, they would mistake each other's stand-ins for
parameters. So if two runs compute gradients through the same layers, the second run waits until the
first run has ended (`in_its_turn`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar

from torchgpipe.task.guards.guard import Guard, GuardedTask

Lock = AbstractContextManager[object]
"""A lock that only one thread can hold; this thread can take it several times."""


class Change(NamedTuple):
    """A temporary change of one entry of a dictionary, such as of a module's `__dict__`.

    To replace a module's parameters, its whole dictionary `_parameters` is replaced. So if a layer
    adds a parameter in its forward, the real dictionary stays unchanged.

    Attributes:
        place: The dictionary.
        key: The key of the entry.
        value: The temporary value.
        may_stay: Whether another value stays that a layer has set meanwhile. Otherwise, the old
            value is restored in any case.
    """

    place: dict[str, Any]
    key: str
    value: Any
    may_stay: bool = False


class InPlace:
    """A context that changes entries of dictionaries, such as attributes of modules.

    If Ctrl-C skips `__exit__`, `__del__` undoes the changes.
    """

    __slots__ = ("_before", "_changes")

    def __init__(self, changes: Sequence[Change]) -> None:
        self._before: list[Any] | None = None
        self._changes = changes

    def __enter__(self) -> None:
        self._before = [place[key] for place, key, _, _ in self._changes]
        for place, key, value, _ in self._changes:
            place[key] = value

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        for (place, key, value, may_stay), before in zip(self._changes, self._before, strict=True):
            if not may_stay or place.get(key) is value:
                place[key] = before
        self._before = None

    def __del__(self) -> None:
        if (
            getattr(self, "_before", None) is not None
        ):  # it is not there if Ctrl-C came at the begin of `__init__`
            InPlace.__exit__(self)


class InPlaceForRun:
    """A context that several threads enter. It changes the layers until all threads have left it.

    The first thread that enters makes the changes, and the last thread that leaves undoes them. The
    last thread can be a worker thread, because the caller does not wait for the workers after a
    second Ctrl-C.

    Args:
        parts: The changes, each with the lock of the layers that are changed.
    """

    def __init__(self, parts: Sequence[tuple[Lock, InPlace]]) -> None:
        self._parts = parts
        self._within: list[int] = []  # an entry for each thread; appending and popping need no lock

    def __enter__(self) -> None:
        first = not self._within
        self._within.append(threading.get_ident())
        for lock, part in self._parts if first else ():
            with lock:
                part.__enter__()

    def __exit__(self, *_: object) -> None:
        self._within.pop()
        if not self._within:
            self.take_back()

    def take_back(self) -> None:
        """Undo the changes of the layers; a second call does nothing."""
        for lock, part in self._parts:
            with lock:
                part.__exit__()


class InPlaceForTask(Guard):
    """A guard that puts stand-ins (detached parameters) into the layers while a task runs."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def before_single_pass(self, task: GuardedTask) -> InPlace:
        """Return a context in which the stand-ins are in the layers.

        A task enters such a context for its forward, for its recomputation and for its backward.
        """
        return InPlace(self._changes)

    before_first_pass = before_recomputation = before_backward = before_single_pass


class _AllOf(AbstractContextManager[object]):
    """A lock that takes several locks, always in the same order."""

    def __init__(self, locks: Set[Lock]) -> None:
        self._locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(*error)

    def _is_owned(self) -> bool:
        """Return whether this thread holds one of the locks, like the method of an `RLock`."""
        locks: list[Any] = self._locks
        return any(lock._is_owned() for lock in locks)


def as_one(locks: Set[Lock]) -> Lock:
    """Return a lock that takes all of the given locks."""
    return _AllOf(locks) if len(locks) > 1 else next(iter(locks))


class Turn:
    """The exclusive use of some layers by one run of a pipeline.

    Attributes:
        locks: The locks of the layers.
        stand_ins: The ids of the detached parameters that the run has put into the layers.
    """

    def __init__(self, locks: frozenset[Lock]) -> None:
        self.locks = locks
        self.stand_ins: set[int] = set()


_turns: ContextVar[tuple[Turn, ...]] = ContextVar("turns", default=())
"""The turns of the runs that the current code is inside of; the innermost run is last."""

T = TypeVar("T")


def in_its_turn(locks: frozenset[Lock], run: Callable[[], T]) -> T:
    """Call `run` while this thread holds the locks of the layers.

    So no other thread runs through these layers at the same time. If an outer run holds some of the
    locks already, only the other locks are taken.
    """
    outer = _turns.get()
    turn = Turn(locks)

    def within() -> T:
        _turns.set((*outer, turn))
        return run()

    # This run may be inside an outer run, maybe in another thread. It must not wait for a lock that
    # the outer run holds, because the outer run waits for this run.
    others = locks.difference(*[each.locks for each in outer])
    # A copy of the context variables is changed. So an interrupt leaves the caller's unchanged.
    return _holding(sorted(others, key=id), lambda: copy_context().run(within))


def _holding(locks: Sequence[Lock], run: Callable[[], T]) -> T:
    """Take all locks, call `run`, and release the locks, even after Ctrl-C."""
    if not locks:
        return run()
    with locks[0]:
        return _holding(locks[1:], run)


def outer_turns() -> list[Turn]:
    """Return the `Turn` of each outer run that uses the same layers as the innermost run.

    A `Turn` is the exclusive use of some layers by one run. A run is inside an outer run if a
    layer, a hook or a criterion of the outer run calls a pipeline.
    """
    *outer, own = _turns.get() or [Turn(frozenset())]
    return [turn for turn in outer if turn.locks & own.locks]


def note_stand_ins(ids: set[int]) -> None:
    """Record the ids of the detached parameters that the innermost run puts into the layers."""
    if turns := _turns.get():
        turns[-1].stand_ins |= ids
