"""The workers engine: its threads, and that no task comes before there is a use for it.

That tasks run at once, as early as they may, is tested in tests/benchmarks/gates/test_meeting.py, errors in
tests/failures, the end of threads in tests/library/test_leaks.py, forked processes in tests/behaviours/rows/tools.py.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from torchgpipe import GPipe
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.observe import Task

from ...plain import piped
from ..layers import linears
from ..ledger import at_once

# Seconds: long enough for a busy machine. A wait ends only when the other side has come.
WAIT = 120


def pipeline(n: int, *, chunks: int, checkpoint: Any = "never") -> GPipe:
    model: GPipe = piped(linears(n), [1] * n, chunks, checkpoint=checkpoint, engine="workers")
    return model


def step(model: GPipe, observer: Callable[[Task], AbstractContextManager[object] | None]) -> None:
    """Run a mini-batch of one sample for each micro-batch, with an observer that may return a context."""
    model.observer = lambda task: observer(task) or nullcontext()
    model(torch.ones(model.chunks, 2)).sum().backward()


@pytest.mark.parametrize("chunks, n, workers", [(3, 3, 2), (1, 3, 0), (4, 1, 0)])
def test_each_partition_has_a_thread_of_its_own_for_good(chunks: int, n: int, workers: int) -> None:
    """The caller, which would only wait, runs the last one; where nothing can overlap, all."""
    before, threads = {*threading.enumerate()}, [set[threading.Thread]() for _ in range(n)]
    model = pipeline(n, chunks=chunks, checkpoint="always")
    for _ in range(3):
        step(model, lambda task: threads[task.partition].add(threading.current_thread()))
    assert [len(t) for t in threads] == [1] * n and threads[-1] == {threading.current_thread()}
    assert len(set.union(*threads)) == workers + 1 and len({*threading.enumerate()} - before) == workers


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_no_recomputation_before_there_is_a_use_for_it(checkpoint: Mode) -> None:
    n, m = 3, 4
    seen: list[tuple[str, Task]] = []

    @contextmanager
    def note(task: Task) -> Iterator[None]:
        seen.append(("begin", task))
        time.sleep(0.02 * (task.kind == "recompute"))
        yield
        seen.append(("end", task))

    step(pipeline(n, chunks=m, checkpoint=checkpoint), note)

    count = checkpointed(checkpoint, m)
    for j in range(n):
        kinds = [(kind, i) for i in reversed(range(m)) for kind in ["recompute"] * (i < count) + ["backward"]]
        begun = [task for what, task in seen if (what, task.partition) == ("begin", j)]
        assert [task[:2] for task in begun if task.kind != "forward"] == kinds

    def recomputed(what: str, i: int, j: int) -> int:
        return seen.index((what, Task("recompute", i, j)))

    for i in range(count):
        for j in range(1, n):
            # The recomputation at j - 1 starts only when its gradient is on its way: j has recomputed.
            assert recomputed("end", i, j) < recomputed("begin", i, j - 1)
            # Partition j starts only after j - 1 has taken the gradient of micro-batch i + 1.
            if i + 1 < count:
                assert recomputed("end", i + 1, j - 1) < recomputed("begin", i, j)


def test_no_partition_is_far_ahead_of_the_next() -> None:
    """A result that is made before it is needed only takes memory."""
    seen: list[Task] = []
    ahead = threading.Event()

    def note(task: Task) -> None:
        seen.append(task)
        if task == ("forward", 2, 0):
            ahead.set()
        if task == ("forward", 0, 1):
            assert ahead.wait(WAIT)
            time.sleep(0.1)
            assert ("forward", 3, 0) not in seen

    step(pipeline(2, chunks=4), note)


class Slow(SimpleQueue[Any]):
    """A queue that lets callers overtake each other between their puts to two workers."""

    def put(self, *item: Any) -> None:
        super().put(*item)
        time.sleep(random.uniform(0, 5e-3))


def test_two_callers_do_not_get_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers must get one caller's programs before another's: otherwise there is a deadlock."""
    monkeypatch.setattr("torchgpipe.engine.pool.SimpleQueue", Slow)
    model, done = pipeline(3, chunks=3), list[Any]()
    at_once(4, lambda _: done.extend(model(torch.ones(3, 2)) for _ in range(5)))
    assert len(done) == 4 * 5


def test_a_thread_that_did_not_start_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, iter([1])
    model, done = pipeline(3, chunks=2), list[Any]()

    def fails_the_second_time(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails_the_second_time)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            model(torch.ones(2, 2))
    at_once(1, lambda _: done.extend(model(torch.ones(2, 2))))
    assert len(done) == 2
