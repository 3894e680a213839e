"""Check that the caller gets a task's error once and soon, and can then use the pipeline again.

The tests also check that nothing of a deleted pipeline remains in memory. Errors about wrong
arguments are tested in other files, because they are raised before any task runs.
"""

import operator
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from linecache import getline
from math import inf
from traceback import extract_tb, walk_stack
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import GPipe
from torchgpipe.engine.relay import Relay
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Kind, Task

from ..library.layers import Pop, Stash
from ..library.ledger import Ledger, assert_gone
from ..parts import Fails, explode
from ..plain import piped

pytestmark = pytest.mark.usefixtures("only_what_the_tests_make")
M, N = 4, 3
PATIENCE = 300  # seconds; only a test that hangs takes as long


def undecodable() -> BaseException:
    return UnicodeDecodeError("utf-8", b"luck", 0, 1, "out of it")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "an error that its message alone does not make": undecodable,
    "an error of PyTorch": partial(torch.OutOfMemoryError, "tried to allocate too much"),
    "Ctrl-C": KeyboardInterrupt,
    "exit": partial(SystemExit, 3),
    "the end of a generator": GeneratorExit,
    "the end of an iterator": partial(StopIteration, "data"),
}


class Journal:
    """Records which tasks start, and raises an error in one chosen task.

    Layers call the journal when their task starts. If a task starts after the failing task, the
    journal makes it wait until the engine knows of the error. As a result, the number of such late
    tasks does not depend on the timing of threads: it is always the largest possible one, one for
    each partition.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.last = {"forward": -1, "recompute": checkpointed(checkpoint, M), "backward": M}
        self.known = threading.Event()
        self._lock = threading.Lock()
        self.begin()

    def begin(self, fail_at: Task | None = None, error: BaseException | None = None) -> None:
        self.fail_at, self.error = fail_at, error
        self.started: list[Task] = []
        self.late: list[Task] = []
        self._next: dict[tuple[str, int], int] = {}
        self.known.clear()

    def reached(self, j: int, kind: Kind) -> None:
        with self._lock:
            before = self._next.get((kind, j), self.last[kind])
            i = before + 1 if kind == "forward" else before - 1
            self._next[kind, j] = i
            task = Task(kind, i, j)
            late = self.fail_at in self.started
            self.started.append(task)
            if late:
                self.late.append(task)
        if task == self.fail_at and self.error is not None:
            explode(self.error)
        if late:
            assert self.known.wait(PATIENCE)


def pipeline(journal: Journal, way: dict[str, Any]) -> GPipe:
    """Build a pipeline whose layers report tasks to the journal. A skip spans all partitions."""
    layers = nn.Sequential(Stash(torch.sin))
    for j in range(N):
        fails = Fails()
        fails.reach = partial(journal.reached, j)  # type: ignore[method-assign]
        layers.extend([nn.Linear(3, 3), fails])
    layers.append(Pop())
    model: GPipe = piped(layers, [3, 2, 3], M, **way)
    return model


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> Journal:
    """Make a `Journal`, which records tasks, and tell it when an error has stopped the workers."""
    journal = Journal(checkpoint)
    stop = Relay.stop

    def stop_and_tell(self: Relay, error: BaseException) -> None:
        stop(self, error)
        journal.known.set()

    monkeypatch.setattr(Relay, "stop", stop_and_tell)
    return journal


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.pow(2).sum().backward()
    found = [y.detach()]
    return found + [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.quick(5)
@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("j", range(N))
@pytest.mark.parametrize("moment", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_an_error_in_any_task(
    kind: Kind,
    moment: str,
    j: int,
    make: Callable[[], BaseException],
    way: dict[str, Any],
    journal: Journal,
) -> None:
    count = checkpointed(way["checkpoint"], M) if kind == "recompute" else M
    micro_batches = {"first": 0, "middle": count // 2, "last": max(0, count - 1)}
    place = Task(kind, micro_batches[moment], j)
    model, x, ledger = pipeline(journal, way), torch.rand(M, 3), Ledger()
    model.observer = ledger if j else None  # without an observer, tasks can share one graph
    expected = gradients(model, x)
    every_task = set(journal.started)
    assert (place in every_task) == (count > 0)
    if not count:
        return

    error = make()
    journal.begin(place, error)
    with pytest.raises(type(error)) as caught:
        gradients(model, x)

    # The caller gets the error once and unchanged.
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    # The error has its own traceback, down to the layer.
    own = "<lambda>" if kind == "backward" else "forward"
    assert [frame.name for frame in extract_tb(caught.tb)][-3:] == [own, "reached", "explode"]
    # The error comes promptly: each other worker starts at most one more task.
    assert set(journal.started) <= every_task
    assert len(journal.started) == len(set(journal.started))
    late = [task.partition for task in journal.late]
    if way["engine"] == "graph":
        assert late == []
    assert place.partition not in late
    assert len(late) == len({*late})

    # The pipeline can be used again, as if it was new.
    journal.begin()
    assert torch.is_grad_enabled()
    assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert set(journal.started) == every_task

    # The pipeline and its parts are freed, apart from the frames in the error's traceback.
    error.__traceback__ = None
    parts = (model, *model.modules(), *model.parameters(), model._engine)
    refs = [*map(weakref.ref, parts)]
    del parts
    del model, caught
    assert_gone(refs)
    ledger.assert_comes_to(0)


def stepped(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model.step(nn.functional.mse_loss, x, x)
    return [p.grad for p in model.parameters()]


# In the graph engine's backward, tensors that a task put into the layers are freed with the error.
@pytest.mark.parametrize(
    "run, engine, checkpoint, kept",
    [
        (gradients, "graph", "always", False),
        (gradients, "workers", "always", False),
        (gradients, "workers", "always", True),
        (stepped, "graph", "always", True),
        (stepped, "workers", "always", True),
        (stepped, "workers", "never", False),
    ],
)
def test_ctrl_c_at_any_line(
    way: dict[str, Any], run: Callable[[Any, Any], Any], kept: bool
) -> None:
    """Check that a pipeline can be used again after Ctrl-C at any line of the library.

    The test interrupts the calling thread before every 47th line that runs in the library. With
    `kept`, the test keeps the errors, as an interactive Python keeps the last error. A kept error
    keeps all objects of its run alive.
    """
    layers = nn.Sequential()
    for _ in range(N):
        layers.append(nn.Linear(3, 3))
    model, x = piped(layers, [1] * N, 2, **way), torch.rand(2, 3)
    expected, parameters = run(model, x), [*model.parameters()]
    errors: list[BaseException] = []
    lines = interrupted(inf, run, model, x)
    for at in range(1, lines, 47):
        try:
            lines = interrupted(at, run, model, x)
        except KeyboardInterrupt as error:
            if kept:
                errors.append(error)
        else:
            # A wait for another thread runs more lines at one time than at another time.
            assert lines < at
        assert torch.is_grad_enabled()
        assert_close(run(model, x), expected, rtol=0, atol=0)
        assert all(map(operator.is_, model.parameters(), parameters))


def interrupted(at: float, run: Callable[[Any, Any], Any], model: Any, x: Tensor) -> int:
    """Call `run`, and raise `KeyboardInterrupt` before it runs its `at`-th line of the library.

    Return how many lines of the library have run.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
        if lines >= at:
            if may_be_interrupted(frame):
                raise KeyboardInterrupt
            if event == "line":
                lines -= 1  # the next line is the one, if there is a next line
        return trace if frame.f_globals["__name__"].startswith("torchgpipe.") else None

    sys.settrace(trace)
    try:
        run(model, x)
    finally:
        sys.settrace(None)
    return lines


def may_be_interrupted(frame: FrameType) -> bool:
    """Return whether Python itself could raise KeyboardInterrupt at this line.

    Python cannot raise it in two places. So the test does not raise it there, either:

    - The end of a `with` block: Python calls the trace function there, but handles no signals.
    - `__del__`: Python does not propagate errors from it.
    """
    line = getline(frame.f_code.co_filename, frame.f_lineno)
    if line.lstrip().startswith("with "):
        return False
    return all(each.f_code.co_name != "__del__" for each, _ in walk_stack(frame))
