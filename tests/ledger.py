"""`Ledger`, an observer that counts the bytes that tasks made and that are alive; and what ends a moment later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchgpipe.observe import Task


class Ledger:
    """Count the bytes of those tensors alive that operators of tasks made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __call__(self, task: Task) -> TorchDispatchMode:
        return _Recording(self)

    def record(self, given: object, made: object) -> None:
        """Count what an operator has made, but not what it was given."""
        before = _storages(given)
        with self._lock:
            self._made.update({ref: n for ref, n in _storages(made).items() if ref not in before})
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        with self._lock:
            self._made = {ref: n for ref, n in self._made.items() if not ref.expired()}
            return sum(self._made.values())

    def assert_comes_to(self, expected: int) -> None:
        assert_eventually(lambda: self.alive == expected, lambda: f"{self.alive} bytes are alive, not {expected}")


class _Recording(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ledger.record((args, kwargs), result)
        return result


def _storages(value: object) -> dict[StorageWeakRef, int]:
    storages = [x.untyped_storage() for x in tree_leaves(value) if isinstance(x, Tensor)]
    return {StorageWeakRef(s): s.nbytes() for s in storages}


def assert_eventually(condition: Callable[[], bool], message: Callable[[], object], seconds: float = 120) -> None:
    """Wait for what a worker does just after it has reported its end; only what never comes takes as long."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    assert condition(), message()


def assert_no_thread_more(threads: set[threading.Thread]) -> None:
    assert_eventually(lambda: {*threading.enumerate()} <= threads, lambda: {*threading.enumerate()} - threads)
