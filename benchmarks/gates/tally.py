"""Count exactly what code does in all of its threads. Nothing is sampled or timed.

    operators   operators that PyTorch runs below autograd, in forward and backward
    nodes       nodes of autograd graphs that calls of backward traverse
    waits       calls by which threads may wait for each other: to put an item into a queue, to take
                a lock, to wait for an event, or to start a thread
    idles       calls of code that polls: to sleep, to read a clock, or to look whether a queue has
                an item instead of waiting for it; a training step should have none of them

The number of these calls is the same in each run. (Reads from a queue that wait for an item are not
counted, because their number varies from run to run.)

The calls are those of the current thread, and of all threads that it starts while the tally runs.
Calls of a queue (`SimpleQueue`), a lock or an event are counted if one of the library's modules
created this object while the tally ran. Calls of locks that are global variables of these modules
are counted, too.

Each rank has a thread that tells the other ranks now and then that the rank is alive. This thread
waits and reads a clock, and how often it does so varies from run to run. So in a rank, only the
waits of the thread that runs the tasks are counted, and readings of a clock are not.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe.tensors._autograd

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and the attribute's new value."""


class Tally:
    """The calls that all threads in `threads` have made since the last call of `clear`.

    The calls are kept in four lists: operators of PyTorch, nodes of autograd graphs, waits (calls
    that may wait for another thread) and idles (calls that sleep, read a clock or poll). They are
    lists and not numbers, because threads can append to a list without a lock.

    Args:
        alone: Whether to count only the waits of the current thread, and no reads of a clock. This
            is meant for ranks, whose heartbeat thread waits and reads a clock.
    """

    def __init__(self, alone: bool = False) -> None:
        self._own = threading.current_thread()
        self.alone = alone
        self.threads = {self._own}
        self.clear()

    def clear(self) -> None:
        """Start to count from zero."""
        self.operators: list[str] = []
        self.nodes: list[int] = []
        self.waits: list[str] = []
        self.idles: list[str] = []

    def watches(self) -> bool:
        """Return whether the calls of the current thread are counted."""
        return threading.current_thread() in self.threads

    def wait(self, what: str) -> None:
        """Count a call by which the current thread may wait for another thread, or wake it."""
        thread = threading.current_thread()
        if thread is self._own or (thread in self.threads and not self.alone):
            self.waits.append(what)

    def idle(self, what: str) -> None:
        """Count a call by which the current thread sleeps, reads a clock, or polls a queue."""
        if self.watches():
            self.idles.append(what)


@contextmanager
def tallied(*, alone: bool = False) -> Iterator[Tally]:
    """Count the calls of this thread, and of threads that are started in the `with` block.

    If `alone` is true, the other threads' waits and all reads of a clock are not counted.
    """
    tally = Tally(alone)
    with ExitStack() as stack:
        for replacements in (_starts, _clocks, _backwards, _queues_and_locks):
            for owner, name, value in replacements(tally):
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Operators(tally))
        yield tally


class _Operators(TorchDispatchMode):
    """A dispatch mode that counts the operators which PyTorch runs.

    Operators of the library's worker threads are counted, too, because these threads run under the
    dispatch modes of the thread that calls the pipeline.
    """

    only_watches = True

    def __init__(self, tally: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tally.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def _starts(tally: Tally) -> Iterator[Patch]:
    """Yield a patch of `Thread.start` that counts the starts of threads."""
    start = threading.Thread.start

    def noted_start(thread: threading.Thread) -> None:
        if tally.watches():
            tally.wait("start")
            tally.threads.add(thread)
        start(thread)

    yield threading.Thread, "start", noted_start


def _clocks(tally: Tally) -> Iterator[Patch]:
    """Yield the patches that count calls of the functions of the module `time`.

    In a rank (`tally.alone`), only sleeps are counted. Reads of a clock are not counted, because a
    rank's heartbeat thread also reads a clock, and how often it does so varies from run to run.
    """
    names = ["sleep"] if tally.alone else ["sleep", "time", "monotonic", "perf_counter"]
    for name in names:
        function = getattr(time, name)

        def noted(*given: Any, name: str = name, function: Any = function) -> Any:
            tally.idle(name)
            return function(*given)

        yield time, name, noted


def _backwards(tally: Tally) -> Iterator[Patch]:
    """Yield the patches that count the nodes that `loss.backward()` and backward tasks traverse."""
    engine = torch.autograd.Variable._execution_engine

    def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if tally.watches():
            tally.nodes.append(len(_reachable(roots)))
        return engine.run_backward(roots, *args, **kwargs)

    noted_engine = SimpleNamespace()
    for name in dir(engine):
        if not name.startswith("__"):
            setattr(noted_engine, name, getattr(engine, name))
    noted_engine.run_backward = run_backward
    yield torch.autograd.Variable, "_execution_engine", noted_engine
    yield torchgpipe.tensors._autograd, "_engine", noted_engine


def _queues_and_locks(tally: Tally) -> Iterator[Patch]:
    """Yield the patches that count calls of the library's queues, locks and events."""

    def noted(make: Callable[[], Any]) -> Callable[[], _Noted]:
        return lambda: _Noted(make(), tally)

    noted_threading = SimpleNamespace(**vars(threading))
    for name in ("Lock", "RLock", "Event", "Condition"):
        setattr(noted_threading, name, noted(getattr(threading, name)))
    locks = type(threading.Lock()) | type(threading.RLock())
    # Patch only the library's modules, and not `threading` itself. Otherwise, a module that is
    # imported while the tally runs would keep patched locks.
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torchgpipe":
            continue
        for name, value in list(vars(module).items()):
            if value is SimpleQueue:
                yield module, name, noted(SimpleQueue)
            elif value is threading:
                yield module, name, noted_threading
            elif isinstance(value, locks):
                yield module, name, _Noted(value, tally)


def _reachable(roots: Sequence[Any]) -> set[Node]:
    found: set[Node] = set()
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


class _Noted:
    """A stand-in for a queue, lock or event, which counts each call that may wait or that polls.

    After the stand-in has counted a call, it makes the same call on the real object, `other`.
    """

    def __init__(self, other: Any, tally: Tally) -> None:
        self._other, self._tally = other, tally

    def put(self, item: Any) -> None:
        self._tally.wait("put")
        self._other.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block or timeout is not None:
            self._tally.idle("get")
        return self._other.get(block, timeout)

    def empty(self) -> Any:
        self._tally.idle("empty")
        return self._other.empty()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> Any:
        if blocking:
            self._tally.wait("acquire")
        return self._other.acquire(blocking, timeout)

    def wait(self, timeout: float | None = None) -> Any:
        self._tally.wait("wait")
        return self._other.wait(timeout)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self._other.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
