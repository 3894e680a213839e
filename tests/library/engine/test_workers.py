"""Test the engines: which one a pipeline uses, which threads it has, and when tasks start.

Other tests check that tasks overlap (tests/benchmarks/gates/test_meeting.py), what happens after
errors (tests/failures), that threads end (tests/library/test_leaks.py), and that forks work
(tests/behaviours/rows/tools).
"""

import pickle
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.gpipe import EngineName
from torchgpipe.tensors.observe import Task
from torchgpipe.timeline import record

from ...behaviours.parts.layers import Do
from ...parts import Fails
from ...plain import piped
from ..layers import linears
from ..ledger import at_once

# Seconds, enough for a busy machine. A wait ends earlier, when the other thread arrives.
WAIT = 120


def pipeline(n: int, *, chunks: int, checkpoint: Any = "never") -> GPipe:
    model: GPipe = piped(linears(n), [1] * n, chunks, checkpoint=checkpoint, engine="workers")
    return model


def step(model: GPipe, observer: Callable[[Task], AbstractContextManager[object] | None]) -> None:
    """Run forward and backward of a mini-batch whose micro-batches have one sample each.

    `observer` is called for each task. If it returns a context, the task runs in that context.
    """
    model.observer = lambda task: observer(task) or nullcontext()
    model(torch.ones(model.chunks, 2)).sum().backward()


@pytest.mark.parametrize("chunks, n, workers", [(3, 3, 2), (1, 3, 0), (4, 1, 0)])
def test_each_partition_has_a_thread_of_its_own_for_good(chunks: int, n: int, workers: int) -> None:
    """Check that each partition always runs in the same thread.

    The last partition runs in the calling thread, which would only wait otherwise. If no tasks can
    overlap, all partitions run in the calling thread.
    """
    before = set(threading.enumerate())
    threads = [set[threading.Thread]() for _ in range(n)]
    model = pipeline(n, chunks=chunks, checkpoint="always")
    for _ in range(3):
        step(model, lambda task: threads[task.partition].add(threading.current_thread()))
    for of_partition in threads:
        assert len(of_partition) == 1
    assert threads[-1] == {threading.current_thread()}
    assert len(set.union(*threads)) == workers + 1
    started = set(threading.enumerate()) - before
    assert len(started) == workers


def test_no_partition_is_far_ahead_of_the_next() -> None:
    """Check that a partition pauses when two of its outputs wait for the next partition.

    A partition that ran further ahead would only use more memory.
    """
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
    """A queue that pauses after each `put`, so that other threads can put items in between."""

    def put(self, *item: Any) -> None:
        super().put(*item)
        time.sleep(random.uniform(0, 5e-3))


def test_two_callers_do_not_get_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that four threads can call a pipeline at once.

    Each call puts a list of tasks into the queue of every worker. These lists must have the same
    order in all queues, because otherwise two workers could wait for each other for ever.
    """
    monkeypatch.setattr("torchgpipe.engine.pool.SimpleQueue", Slow)
    model = pipeline(3, chunks=3)

    def call_five_times(_: int) -> int:
        for _ in range(5):
            model(torch.ones(3, 2))
        return 5

    assert at_once(4, call_five_times) == [5, 5, 5, 5]


def test_a_thread_that_did_not_start_is_started_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    started = 0
    model = pipeline(3, chunks=2)

    def fails_the_second_time(thread: threading.Thread) -> None:
        nonlocal started
        if started == 1:
            raise RuntimeError("can't start new thread")
        start(thread)
        started += 1

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails_the_second_time)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            model(torch.ones(2, 2))
    (output,) = at_once(1, lambda _: model(torch.ones(2, 2)))
    assert output.shape == (2, 2)


# The argument `engine` of `GPipe`, the devices, and the class of the engine that must be chosen.
CASES: list[tuple[EngineName, list[str], str]] = [
    ("auto", ["cpu"], "GraphEngine"),
    ("auto", ["cpu", "cpu"], "ProgramsEngine"),
    ("auto", ["cpu", "meta"], "GraphEngine"),
    ("graph", ["cpu", "cpu"], "GraphEngine"),
    ("workers", ["cpu"], "ProgramsEngine"),
]


@pytest.mark.parametrize("engine, devices, expected", CASES)
def test_the_engine_is_chosen_once(engine: EngineName, devices: list[str], expected: str) -> None:
    n = len(devices)
    model = piped(linears(n), [1] * n, devices=devices, engine=engine)
    chosen = model._engine
    for size, chunks, checkpoint in ((1, 1, "never"), (8, 4, "always"), (3, 8, "except_last")):
        model.chunks = chunks
        model.checkpoint = checkpoint
        model(torch.ones(size, 2))
        model.train(not model.training)
    assert model._engine is chosen
    pickled = pickle.loads(pickle.dumps(model))
    for each in (model, pickled):
        assert type(each._engine).__name__ == expected


def test_what_a_backward_that_failed_has_left_is_not_handed_to_the_next() -> None:
    fails = Fails()
    apart = Do(lambda self, x: (x, self.weight * 2), weight=nn.Parameter(torch.ones(2, 2)))
    layers = nn.Sequential(nn.Linear(2, 2), fails, apart)
    model = piped(layers, [2, 1], 2, engine="graph")
    one, other = model(torch.ones(2, 2))
    fails.fail("backward", ArithmeticError(), calls_before=1)
    with pytest.raises(ArithmeticError):
        one.sum().backward(retain_graph=True)
    other.sum().backward()
    with_gradient = [p.grad is not None for p in model.parameters()]
    assert with_gradient == [False, False, True]


def test_an_evaluation_in_another_thread_is_not_stopped_by_a_step() -> None:
    """Check that a step does not stop an evaluation that runs in another thread."""
    model = pipeline(2, chunks=2)
    started, go_on = threading.Event(), threading.Event()
    ones = torch.ones(4, 2)

    def criterion(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        started.set()
        go_on.wait(WAIT)
        return y.sum()

    def run(k: int) -> object:
        if k == 0:
            return model.evaluate(criterion, ones, ones)
        assert started.wait(WAIT)
        if k == 1:
            return model.step(lambda y, t: y.mean(), ones, ones)
        time.sleep(0.1)  # the step, which begins meanwhile, has to wait for the worker threads
        go_on.set()
        return None

    results = at_once(3, run)
    assert [result for result in results if isinstance(result, BaseException)] == []


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
def test_a_hook_in_the_last_partition_may_call_the_pipeline(schedule: str, mode: Any) -> None:
    """Check that a hook in the last partition may call the pipeline, also in a recomputation."""
    model = piped(linears(2), [1, 1], 2, checkpoint=mode, engine="workers", schedule=schedule)
    x = torch.linspace(-1, 1, 8).view(4, 2)
    with torch.no_grad():
        expected = torch.cat([model[:](part) for part in x.chunk(2)])
    outputs: list[torch.Tensor] = []
    inside = threading.local()

    def call(*_: Any) -> None:
        if not hasattr(inside, "now"):
            inside.now = True
            outputs.append(model.predict(x))
            del inside.now

    model[-1].register_forward_hook(call)
    model.step(nn.functional.mse_loss, x, x)
    assert len(outputs) == (4 if mode == "always" else 2)
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_timeline_has_no_tasks_at_once_that_exclude_each_other() -> None:
    """Check that a task which waits for a module that another task uses has not begun yet."""

    def pause(layer: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x * layer.scale

    shared = Do(pause, scale=torch.ones(()))
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(shared))
    model = piped(layers, [1, 1], 4, checkpoint="always", engine="workers")
    with record(model) as recording:
        model.step(lambda y, _: y.mean(), torch.ones(4, 2))
    (mini_batch,) = recording.steps
    events = sorted(mini_batch.events, key=lambda event: event.start)
    assert len(events) > 8
    for earlier, later in pairwise(events):
        assert earlier.end <= later.start
