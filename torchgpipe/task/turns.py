"""Let only one thread at a time use some layers, for one task or for a whole run.

A task holds a lock of its layers. A run (all forwards, all backwards, or a whole step) has a turn.

In a run with gradients, the layers contain stand-ins (detached parameters). If two threads ran the
same layers at the same time, they would mistake each other's stand-ins for parameters. So if two
runs compute gradients through the same layers, the second run waits until the first run has ended
(`in_its_turn`).
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

Lock = AbstractContextManager[object]
"""A lock that only one thread can hold; this thread can take it several times."""


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
