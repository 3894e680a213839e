"""Define helpers of tests, which count live bytes, wait for a condition, or start threads."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from torchgpipe.tensors.observe import Task
from torchgpipe.trace.parts import tensors_in


class Ledger(LiveBytes):
    """An observer of a pipeline that counts the live bytes of tensors that its tasks create.

    Tensors that a task receives do not count.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def __call__(self, task: Task) -> LiveBytesMode:
        return _Made(self, 0)

    @property
    def alive(self) -> int:
        return self.live[0]

    def assert_comes_to(self, expected: int) -> None:
        def message() -> str:
            return f"{self.alive} bytes are alive, not {expected}"

        assert_eventually(lambda: self.alive == expected, message)


class _Made(LiveBytesMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counter.add(tensors_in((args, kwargs)), 1)
        return super().__torch_dispatch__(func, types, args, kwargs)


def assert_eventually(
    condition: Callable[[], bool], message: Callable[[], object], seconds: float = 120
) -> None:
    """Wait until a condition holds, and fail if it does not hold within `seconds`.

    A test has to wait, for example, for what a worker does after it has reported its result.
    """
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    assert condition(), message()


def assert_no_thread_more(threads: set[threading.Thread]) -> None:
    def more() -> set[threading.Thread]:
        return set(threading.enumerate()) - threads

    assert_eventually(lambda: not more(), more)


def assert_gone(refs: Sequence[ref[Any]]) -> None:
    """Assert that garbage collection frees all objects."""
    # After an exception, autograd keeps the nodes of the graph that have not run. The next backward
    # in this thread frees them, so run one.
    torch.ones((), requires_grad=True).mul(2).backward()

    def gone() -> bool:
        gc.collect()
        return all(each() is None for each in refs)

    assert_eventually(gone, lambda: [each() for each in refs])


def at_once(count: int, program: Callable[[int], Any], seconds: float = 120) -> list[Any]:
    """Call `program(0)` to `program(count - 1)` at the same time, each in a thread of its own.

    Return a list with the result of each call, or with the exception that the call has raised.
    """
    results: list[Any] = [None] * count

    def run(k: int) -> None:
        try:
            results[k] = program(k)
        except BaseException as error:
            results[k] = error

    threads = []
    for k in range(count):
        thread = threading.Thread(target=run, args=(k,), daemon=True)
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "they wait for each other"
    return results
