"""Tally what a piece of a program does, in all of its threads, exactly: nothing here is sampled or timed.

    operators   what reaches PyTorch's dispatcher below autograd, forward and backward
    nodes       of autograd graphs that backward goes through, in whatever graph
    alive       tensors that operators made, counted by storage: a tensor and its views are one
    threads     started from Python
    waits       for threads: an item handed over by a queue, a lock, a thread joined, whether or not one had to wait
    reads       waits for a device: synchronizing it, and operators whose result the host needs before it can go on

A thread is watched from its start, so what shall be tallied has to start its threads, and make its queues and locks,
meanwhile. Queues (`queue.SimpleQueue`) and locks are seen in the library's own modules, `Thread.join` and `Event.wait`
everywhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe._autograd
from benchmarks.waits import Replacement, reads, waits
from reproduce.run.live_bytes import LiveBytes
from torchgpipe.plan.operators import tensors_in

PATIENCE = 120.0
"""Seconds that a thread gets to come to rest, or to end; on however busy a machine, only a fault takes as long."""


class Tally:
    """What was seen since the last `clear`. Lists, since appending needs no lock."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        """All that were started, whenever."""
        self.tensors = LiveBytes(1)
        self._own = threading.current_thread()
        self._at_rest: set[threading.Thread] = set()
        self.clear()

    def wait(self, what: str) -> None:
        """Note that the running thread may wait for another one."""
        if self.watches():
            self.waits.append(what)

    def read(self, what: str) -> None:
        """Note that the running thread would wait for a device."""
        if self.watches():
            self.reads.append(what)

    def watches(self) -> bool:
        """Return whether the running thread is one of those whose doings count."""
        thread = threading.current_thread()
        return thread is self._own or thread in self.threads

    def clear(self) -> None:
        """Begin anew; what is alive now counts no more."""
        self.operators: list[Any] = []
        self.nodes: list[int] = []
        self.waits: list[str] = []
        self.reads: list[str] = []
        self.tensors.restart()
        self._before = self.tensors.count, self.tensors.live[0]

    def alive(self) -> tuple[int, int]:
        """Return how many tensors are alive now beyond those at the beginning, and their bytes."""
        return self.tensors.count - self._before[0], self.tensors.live[0] - self._before[1]

    def peak(self) -> tuple[int, int]:
        """Return how many were alive at most, and the most bytes."""
        return self.tensors.most - self._before[0], self.tensors.peak[0] - self._before[1]

    def settle(self) -> None:
        """Wait until every thread that was started has ended, or waits at a queue with nothing in its hands."""
        if busy := _after_a_while(lambda: [t for t in self.threads if t.is_alive() and t not in self._at_rest]):
            raise RuntimeError(f"thread {busy[0].name!r} neither ends nor waits at a queue")

    def left(self) -> int:
        """Return how many of the threads that were started do not end."""
        return len(_after_a_while(lambda: [t for t in self.threads if t.is_alive()]))

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Mark the running thread as one that waits for work."""
        self._at_rest.add(threading.current_thread())
        try:
            yield
        finally:
            self._at_rest.discard(threading.current_thread())


def _after_a_while(find: Callable[[], list[threading.Thread]]) -> list[threading.Thread]:
    """Return what is still found when there was time for it to vanish."""
    end = time.monotonic() + PATIENCE
    while (found := find()) and time.monotonic() < end:
        time.sleep(1e-4)
    return found


@contextlib.contextmanager
def tallied() -> Iterator[Tally]:
    """Tally what this thread, and threads that are started meanwhile, do."""
    tally = Tally()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            *_threads(tally),
            *_engines(tally),
            *waits(tally.wait, tally.at_rest),
            *reads(tally.read),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_Operators(tally))
        yield tally


class _Operators(TorchDispatchMode):
    """Not to be shared by threads."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tally.operators.append(func)
        dynamic = torch.Tag.dynamic_output_shape in func.tags and (kwargs or {}).get("output_size") is None
        if dynamic or torch.Tag.data_dependent_output in func.tags:
            self._tally.read(str(func))
        self._tally.tensors.add(tensors_in(result), 0)
        return result


def _threads(tally: Tally) -> Iterator[Replacement]:
    start = threading.Thread.start

    def start_watched(thread: threading.Thread) -> None:
        if tally.watches():
            run = thread.run

            def run_watched() -> None:
                with _Operators(tally):
                    run()

            thread.run = run_watched  # type: ignore[method-assign]
            tally.threads.append(thread)
        start(thread)

    yield threading.Thread, "start", start_watched


class _Engine:
    """PyTorch's autograd engine, with a look at each graph that goes backward."""

    def __init__(self, engine: Any, tally: Tally) -> None:
        self._engine = engine
        self._tally = tally

    def run_backward(self, roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if self._tally.watches():
            self._tally.nodes.append(len(_reachable(roots)))
        return self._engine.run_backward(roots, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _engines(tally: Tally) -> Iterator[Replacement]:
    engine = _Engine(torch.autograd.Variable._execution_engine, tally)
    yield torch.autograd.Variable, "_execution_engine", engine  # for loss.backward()
    yield torchgpipe._autograd, "_engine", engine  # for tasks


def _reachable(roots: Sequence[Any]) -> set[Node]:
    found: set[Node] = set()
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found
