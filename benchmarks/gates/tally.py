"""Count exactly what code does, in all of its threads. Nothing is sampled or timed.

    operators   calls that reach PyTorch's dispatcher below autograd, forward and backward
    nodes       nodes of autograd graphs that calls of backward traverse
    waits       calls with which threads wait for each other: items put into queues, locks, events, threads started

It is chance whether a thread really waits, and how often a loop reads from a queue, but not how many items are put into
it. Threads are counted if they are started while the tally runs; queues (`SimpleQueue`) and locks, if the library's own
modules create them meanwhile.
"""

import sys
import threading
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


class Tally:
    """What was seen in `threads` since the last `clear`. These are lists because appending needs no lock."""

    def __init__(self) -> None:
        self.threads = {threading.current_thread()}
        self.clear()

    def clear(self) -> None:
        """Start to count from zero."""
        self.operators: list[str] = []
        self.nodes: list[int] = []
        self.waits: list[str] = []

    def watches(self) -> bool:
        """Return whether the current thread is counted."""
        return threading.current_thread() in self.threads

    def wait(self, what: str) -> None:
        """Count a call with which the current thread may wait for another."""
        if self.watches():
            self.waits.append(what)


@contextmanager
def tallied() -> Iterator[Tally]:
    """Count what this thread does, and threads that are started meanwhile."""
    tally = Tally()
    with ExitStack() as stack:
        for owner, name, replacement in _replacements(tally):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_Operators(tally))
        yield tally


class _Operators(TorchDispatchMode):
    """Count the operators of this thread, and of workers, which get the modes that are around the call."""

    only_watches = True

    def __init__(self, tally: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tally.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def _replacements(tally: Tally) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to patch: an object, the name of its attribute, and the new value."""
    start, engine = threading.Thread.start, torch.autograd.Variable._execution_engine

    def noted_start(thread: threading.Thread) -> None:
        if tally.watches():
            tally.wait("start")
            tally.threads.add(thread)
        start(thread)

    def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if tally.watches():
            tally.nodes.append(len(_reachable(roots)))
        return engine.run_backward(roots, *args, **kwargs)

    names = [name for name in dir(engine) if not name.startswith("__")]
    noted_engine = SimpleNamespace(
        **{name: getattr(engine, name) for name in names} | {"run_backward": run_backward}
    )
    yield threading.Thread, "start", noted_start
    yield torch.autograd.Variable, "_execution_engine", noted_engine  # for loss.backward()
    yield torchgpipe.tensors._autograd, "_engine", noted_engine  # for tasks

    def noted(make: Callable[[], Any]) -> Callable[[], _Noted]:
        return lambda: _Noted(make(), tally)

    made = {
        name: noted(getattr(threading, name)) for name in ("Lock", "RLock", "Event", "Condition")
    }
    noted_threading = SimpleNamespace(**vars(threading) | made)
    locks = type(threading.Lock()) | type(threading.RLock())
    # Patch only the library's modules: modules imported meanwhile would keep patched locks for good.
    for module in [
        module for name, module in sys.modules.items() if name.partition(".")[0] == "torchgpipe"
    ]:
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
    """A wrapper of a queue, lock or event that counts calls with which a thread may wait."""

    def __init__(self, other: Any, tally: Tally) -> None:
        self._other, self._tally = other, tally

    def put(self, item: Any) -> None:
        self._tally.wait("put")
        self._other.put(item)

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
