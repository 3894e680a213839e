"""Let only one run of a pipeline at a time use some layers.

A run is the work of all forwards, of all backwards, or of a whole step. In a run with gradients,
the layers contain stand-ins (detached parameters). If two runs used the same layers at the same
time, they would mistake each other's stand-ins for parameters. So the second run waits until the
first run has ended. The time in which a run alone uses its layers is called its turn.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

Lock = AbstractContextManager[object]
"""A lock that only one thread can hold; this thread can take it several times."""


class _AllOf(AbstractContextManager[object]):
    """A lock that takes several locks, always in the same order, so that no deadlock can occur."""

    def __init__(self, locks: Set[Lock]) -> None:
        self._locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(*error)

    def _is_owned(self) -> bool:
        """Return whether this thread holds one of the locks, like the same method of `RLock`."""
        locks: list[Any] = self._locks
        return any(lock._is_owned() for lock in locks)


def as_one(locks: Set[Lock]) -> Lock:
    """Return a single lock; a thread that takes it takes all of the given locks."""
    return _AllOf(locks) if len(locks) > 1 else next(iter(locks))


class Turn:
    """The exclusive use of some layers by one run of a pipeline, such as a whole step.

    Attributes:
        locks: The locks of the layers.
        stand_ins: The ids of the detached parameters that the run has put into the layers.
    """

    def __init__(self, locks: frozenset[Lock]) -> None:
        self.locks = locks
        self.stand_ins: set[int] = set()


_turns: ContextVar[tuple[Turn, ...]] = ContextVar("turns", default=())
"""The turns of all runs within which the current code runs, the innermost run last."""


def in_its_turn(locks: frozenset[Lock], run: Callable[[], T]) -> T:
    """Call `run` while this thread holds the locks of the layers; return the result.

    Meanwhile, no other run can use these layers. If a layer of an outer run has called this
    pipeline, the outer run may hold some of the locks. Then only the other locks are taken.

    Args:
        locks: The locks of the layers.
        run: A function that runs all forwards, all backwards, or a whole step.
    """
    outer = _turns.get()
    turn = Turn(locks)

    def within() -> T:
        _turns.set((*outer, turn))
        return run()

    # A layer of an outer run, maybe in another thread, may have called this function. Then this run
    # must not wait for a lock that the outer run holds, because the outer run waits for this run.
    others = locks.difference(*[each.locks for each in outer])
    # A copy of the context variables is changed. So an interrupt leaves the caller's unchanged.
    return _holding(sorted(others, key=id), lambda: copy_context().run(within))


def _holding(locks: Sequence[Lock], run: Callable[[], T]) -> T:
    """Call `run` while this thread holds all locks; release the locks even after Ctrl-C."""
    if not locks:
        return run()
    with locks[0]:
        return _holding(locks[1:], run)


def outer_turns() -> list[Turn]:
    """Return the `Turn` of each outer run that uses some of the layers of the innermost run.

    A `Turn` is the exclusive use of some layers by one run. Runs are nested if a layer, a hook or a
    criterion calls a pipeline: the run of that pipeline is the inner one.
    """
    *outer, own = _turns.get() or [Turn(frozenset())]
    return [turn for turn in outer if turn.locks & own.locks]


def note_stand_ins(ids: set[int]) -> None:
    """Record which stand-ins (detached parameters) the current run puts into the layers.

    Args:
        ids: The ids of these stand-ins.
    """
    if turns := _turns.get():
        turns[-1].stand_ins |= ids
