"""Stand-ins for what threads wait by, that note each time a thread may have to wait, whether or not it has to.

Chance decides whether a thread has to wait, and how often a loop takes from a queue; but not how many items are handed
over, locks taken, threads joined.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

Replacement = tuple[Any, str, Any]
"""An object, an attribute of it, and what shall stand there."""

Note = Callable[[str], None]


def waits(note: Note, at_rest: Callable[[], AbstractContextManager[None]]) -> Iterator[Replacement]:
    """Yield stand-ins for queues and locks in the library's modules, and for `Thread.join` and `Event.wait`.

    A thread that waits at a queue is inside `at_rest()`.
    """

    class Queue(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            note("queue")
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            with at_rest():
                return super().get(block, timeout)

    lock, rlock = threading.Lock, threading.RLock
    locks = {"Lock": lambda: _Lock(lock(), note), "RLock": lambda: _Lock(rlock(), note)}
    stand_ins = (
        (queue.SimpleQueue, Queue),
        (queue, _Module(queue, SimpleQueue=Queue)),
        (lock, locks["Lock"]),
        (rlock, locks["RLock"]),
        (threading, _Module(threading, **locks)),
    )
    # In the library's modules only: others, imported meanwhile, would keep what they made of them.
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "torchgpipe"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type(lock()) | type(rlock())):
                yield module, name, _Lock(value, note)
            for original, stand_in in stand_ins:
                if value is original:
                    yield module, name, stand_in
    yield _noted(threading.Thread, "join", note)
    yield _noted(threading.Event, "wait", note)


def reads(note: Note) -> Iterator[Replacement]:
    """Yield stand-ins for what waits for a device."""
    for owner in (torch.cuda, torch.cpu, torch.accelerator, torch.cuda.Stream, torch.cuda.Event):
        yield _noted(owner, "synchronize", note)


def _noted(owner: Any, name: str, note: Note) -> Replacement:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(f"{owner.__name__}.{name}")
        return function(*args, **kwargs)

    return owner, name, call


class _Lock:
    def __init__(self, lock: Any, note: Note) -> None:
        self._lock = lock
        self._note = note

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self._note("lock")
        taken: bool = self._lock.acquire(blocking, timeout)
        return taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class _Module:
    """A module in which some names are replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
