"""What is put into the layers for a while, and taken back: for one pass of a task, or for a run.

What goes wrong without it: a criterion reads a weight of the layers, for a penalty. It would find
the parameter, and not the stand-in that the tasks use, and add to its gradient by itself.

Programs have stand-ins of parameters in the layers from the beginning of a run to its end, so that
whoever reads them meets the same ones: layers, the criterion, a penalty over the model's
parameters. The graph engine has them there for each task, as nobody tells it when a backward has
failed. What a recomputation needs is there for as long as it runs.

Two runs at once, in two threads, would take each other's stand-ins for the parameters of the
layers. So runs that take gradients through the same layers wait for each other (`in_its_turn`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar

from torchgpipe.task.guards.guard import Guard, GuardedTask

Lock = AbstractContextManager[object]
"""What keeps all but one thread from running some modules; one thread may take it several times."""


class Change(NamedTuple):
    """A dictionary, such as the attributes of a module; a key; and what is put there.

    Of parameters and buffers the whole dictionary is replaced, since a layer may add to it in its
    forward. What others put there meanwhile is taken back, too, unless it `may_stay`.
    """

    place: dict[str, Any]
    key: str
    value: Any
    may_stay: bool = False


class InPlace:
    """Make changes while a thread is within this context.

    If Ctrl-C skips `__exit__`, `__del__` takes the changes back.
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
    """Make changes while any program of a run is within this context, each in its thread.

    The last to leave takes them back. After a second Ctrl-C, which does not wait for programs, that
    is not the caller. Each part has the lock of the layers that it changes.
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
        """Take the changes back, unless that was done."""
        for lock, part in self._parts:
            with lock:
                part.__exit__()


class InPlaceForTask(Guard):
    """Make changes for each pass and backward of a task, where no run has made them."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def before_single_pass(self, task: GuardedTask) -> InPlace:
        """Return the context of any pass, and of backward, which may run layers again."""
        return InPlace(self._changes)

    before_first_pass = before_recomputation = before_backward = before_single_pass


class _AllOf(AbstractContextManager[object]):
    """Several locks as one, always taken in the same order."""

    def __init__(self, locks: Set[Lock]) -> None:
        self._locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(*error)


def as_one(locks: Set[Lock]) -> Lock:
    """Return a lock that takes all of these."""
    return _AllOf(locks) if len(locks) > 1 else next(iter(locks))


class Turn:
    """A run's turn at layers: by their `locks`, and what it puts there, by the ids of stand-ins."""

    def __init__(self, locks: frozenset[Lock]) -> None:
        self.locks = locks
        self.stand_ins: set[int] = set()


_turns: ContextVar[tuple[Turn, ...]] = ContextVar("turns", default=())
"""The turns that the present code is within; the innermost last."""

T = TypeVar("T")


def in_its_turn(locks: frozenset[Lock], run: Callable[[], T]) -> T:
    """Call `run` when no other thread is in a run through layers with these locks.

    Other threads are kept out meanwhile.
    """
    outer = _turns.get()
    turn = Turn(locks)

    def within() -> T:
        _turns.set((*outer, turn))
        return run()

    # A run within a run may be in another thread, which would wait for ever.
    others = locks.difference(*[each.locks for each in outer])
    # In a copy of the caller's context, where an interrupt can leave nothing behind.
    return _holding(sorted(others, key=id), lambda: copy_context().run(within))


def _holding(locks: Sequence[Lock], run: Callable[[], T]) -> T:
    """Call `run` while all locks are held.

    If there were a `with` for each lock, Ctrl-C could leave locks held.
    """
    if not locks:
        return run()
    with locks[0]:
        return _holding(locks[1:], run)


def outer_turns() -> list[Turn]:
    """Return the turns of runs through the same layers that the innermost turn is within.

    There are some where a layer, a hook or a criterion calls the pipeline that runs it, or one that
    shares layers.
    """
    *outer, own = _turns.get() or [Turn(frozenset())]
    return [turn for turn in outer if turn.locks & own.locks]


def note_stand_ins(ids: set[int]) -> None:
    """Note the stand-ins that the innermost turn puts into the layers, by their ids."""
    if turns := _turns.get():
        turns[-1].stand_ins |= ids
