"""Errors while the pipeline runs: in any task, they reach the caller once, promptly, and leave the pipeline usable.

Misuse that is refused before anything runs is tested with the module that refuses it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe import GPipe, is_recomputing
from torchgpipe.checkpoint import checkpointed
from torchgpipe.relay import Relay
from torchgpipe.skip import pop, skippable, stash

from .plain import piped

PATIENCE = 300  # seconds; only a hang takes as long
M, N = 4, 3


class Boom(Exception):
    """An error that cannot be made from its message alone, as many a library's."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Task(NamedTuple):
    kind: str
    i: int
    j: int


class Journal:
    """Write down each task that starts, and fail at one of them.

    Tasks that start while another one is failing wait until the engine knows, so that they are as many as there
    can be, whatever the threads' timing: one per partition.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.last = {"forward": -1, "recompute": checkpointed(checkpoint, M), "backward": M}
        self.fail_at: Task | None = None
        self.error: BaseException = Boom(1, reason="unset")
        self.known = threading.Event()
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.started: list[Task] = []
        self.late: list[Task] = []
        self._next: dict[tuple[str, int], int] = {}
        self._failing = False
        self.known.clear()

    def task(self, kind: str, j: int) -> None:
        with self._lock:
            step = 1 if kind == "forward" else -1
            i = self._next[kind, j] = self._next.get((kind, j), self.last[kind]) + step
            task = Task(kind, i, j)
            self.started.append(task)
            late = self._failing
            if late:
                self.late.append(task)
            self._failing = self._failing or task == self.fail_at
        if task == self.fail_at:
            explode(self.error)
        if late:
            assert self.known.wait(PATIENCE)


def explode(error: BaseException) -> None:
    raise error


class Layer(nn.Module):
    """A partition's only layer: linear, with an entry in the journal for every task."""

    def __init__(self, journal: Journal, j: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.journal, self.j = journal, j

    def forward(self, x: Tensor) -> Tensor:
        self.journal.task("recompute" if is_recomputing() else "forward", self.j)
        y: Tensor = Noted.apply(self, self.linear(x))
        return y


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, y: Tensor) -> Tensor:
        ctx.layer = layer
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.layer.journal.task("backward", ctx.layer.j)
        return None, grads[0]


def pipeline(journal: Journal, way: dict[str, Any], n: int = N) -> GPipe:
    return piped(nn.Sequential(*(Layer(journal, j) for j in range(n))), [1] * n, M, **way)


def pipeline_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("gpipe-partition")}


@pytest.fixture(scope="module", autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Of all the pipelines here that failed."""
    before = pipeline_threads()
    yield
    gc.collect()
    for thread in pipeline_threads() - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} outlives its pipeline"


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> Iterator[Journal]:
    """A journal that is told when workers have been stopped."""
    journal, stop = Journal(checkpoint), Relay.stop

    def stop_and_tell(self: Relay, error: BaseException) -> None:
        stop(self, error)
        journal.known.set()

    monkeypatch.setattr(Relay, "stop", stop_and_tell)
    yield journal
    # Its traceback holds the graph, whose layers hold the journal.
    del journal.error


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.pow(2).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("j", range(N))
@pytest.mark.parametrize("moment", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_an_error_in_any_task(kind: str, moment: str, j: int, way: dict[str, Any], journal: Journal) -> None:
    count = checkpointed(way["checkpoint"], M) if kind == "recompute" else M
    place = Task(kind, {"first": 0, "middle": count // 2, "last": max(0, count - 1)}[moment], j)
    model, x = pipeline(journal, way), torch.rand(M, 3)
    expected = gradients(model, x)
    every_task = set(journal.started)
    assert (place in every_task) == (count > 0)
    if not count:
        return
    journal.clear()

    journal.fail_at, journal.error = place, Boom(7, reason="out of luck")
    with pytest.raises(Boom, match=r"out of luck \(7\)") as caught:
        gradients(model, x)

    # Once, as it is.
    assert caught.value is journal.error
    assert caught.value.__cause__ is caught.value.__context__ is None
    # With its own traceback, down to the layer.
    own = "backward" if kind == "backward" else "forward"
    assert [frame.name for frame in extract_tb(caught.tb)][-3:] == [own, "task", "explode"]
    # Promptly: of the tasks that had not started, each other worker was about to start one at most.
    assert set(journal.started) <= every_task
    assert len(journal.started) == len(set(journal.started))
    assert {task.j for task in journal.late}.isdisjoint({place.j})
    assert len(journal.late) == len({task.j for task in journal.late})
    if way["engine"] == "graph":
        assert journal.late == []
    # And none that needs what has failed.
    for task in journal.started:
        assert not _needs(task, place), f"{task} was run although {place} failed"

    # As good as new.
    journal.clear()
    journal.fail_at = None
    assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert set(journal.started) == every_task


def _needs(task: Task, failed: Task) -> bool:
    """Return whether `task` comes after `failed` by the rules of the schedule."""
    if task == failed:
        return False
    if failed.kind == "forward":
        return task.kind != "forward" or (task.i >= failed.i and task.j >= failed.j)
    if task.kind == "forward":
        return False
    if failed.kind == "recompute":
        if task.kind == "recompute":
            return task.i < failed.i and task.j == failed.j
        return task.i <= failed.i and task.j <= failed.j
    return task.kind == "backward" and task.i <= failed.i and task.j <= failed.j


@pytest.mark.parametrize("engine, checkpoint", [("workers", "always")])
def test_a_recomputation_under_way_is_not_followed_by_its_backward(way: dict[str, Any], journal: Journal) -> None:
    """The last partition waits for nobody's gradient, and has to ask before it goes on."""
    model = pipeline(journal, way, n=2)
    under_way = threading.Event()
    started: list[Task] = []

    @contextmanager
    def observer(task: tuple[str, int, int]) -> Iterator[None]:
        started.append(Task(*task))
        if task == ("recompute", M - 2, 1):
            under_way.set()
            assert journal.known.wait(PATIENCE)
        if task == ("backward", M - 1, 0):
            assert under_way.wait(PATIENCE)
            raise Boom(1, reason="meanwhile")
        yield

    model.observer = observer
    loss = model(torch.rand(M, 3)).sum()
    started.clear()
    with pytest.raises(Boom, match="meanwhile"):
        loss.backward()

    assert [(kind, i) for kind, i, j in started if j == 1] == [
        ("recompute", M - 1), ("backward", M - 1), ("recompute", M - 2),
    ]  # fmt: skip


ERRORS: dict[str, Callable[[], BaseException]] = {
    "an error of PyTorch": lambda: torch.OutOfMemoryError("tried to allocate too much"),
    "Ctrl-C": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "the end of an iterator": lambda: StopIteration("data"),
    "a timeout": TimeoutError,
    "a warning": lambda: UserWarning("as an error"),
}


@pytest.mark.parametrize("checkpoint", ["always"])
@pytest.mark.parametrize("j", range(2))
@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
def test_any_type_of_error(
    make: Callable[[], BaseException], kind: str, j: int, way: dict[str, Any], journal: Journal
) -> None:
    journal.fail_at, journal.error = Task(kind, 1, j), make()
    model = pipeline(journal, way, n=2)
    with pytest.raises(type(journal.error)) as caught:
        gradients(model, torch.rand(M, 3))
    assert caught.value is journal.error

    journal.clear()
    journal.fail_at = None
    gradients(model, torch.rand(M, 3))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("checkpoint", ["always"])
def test_modes_are_as_before(training: bool, grad: bool, way: dict[str, Any], journal: Journal) -> None:
    journal.fail_at, journal.error = Task("forward", 1, 1), Boom(1, reason="once")
    model = pipeline(journal, way).train(training)

    with torch.set_grad_enabled(grad):
        with pytest.raises(Boom, match="once"):
            model(torch.rand(M, 3))

        assert torch.is_grad_enabled() == grad
        assert model.training == training
        journal.clear()
        journal.fail_at = None
        assert model(torch.rand(M, 3)).requires_grad == grad


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return x + 1


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return x + skip


class Flaky(nn.Module):
    """Fail at the second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise Boom(self.calls, reason="flaky")
        return x


def test_skips_of_a_failed_mini_batch_are_gone(engine: str) -> None:
    """What was stashed before the failure must not meet a later mini-batch."""
    model = piped(nn.Sequential(Stash(), Flaky(), Pop()), [1, 1, 1], 2, engine=engine)

    with pytest.raises(Boom):
        model(torch.full((4, 1), 100.0))

    assert model(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).flatten().tolist() == [3, 5, 7, 9]


class Returns(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> object:
        return self.value


# What a layer returns; what is said about it.
RETURNED = {
    "nothing": (None, TypeError, "output of partition 1 must be .* but got NoneType"),
    "a list": ([torch.rand(1)], TypeError, "output of partition 1 must be .* but got list"),
    "an empty tuple": ((), TypeError, "output of partition 1 must be .* but got an empty tuple"),
    "a number in a tuple": ((torch.rand(1), 2.0), TypeError, "output of partition 1 must be .* but element 1 is float"),
    "a loss": (torch.tensor(1.0), ValueError, "returned a scalar; move a loss"),
}


@pytest.mark.parametrize("value, error, message", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("more", [0, 1])
def test_an_output_that_cannot_be_passed_on(engine: str, more: int, value: object, error: Any, message: str) -> None:
    layers = nn.Sequential(nn.Linear(1, 1), Returns(value), *(nn.Identity() for _ in range(more)))
    model = piped(layers, [1] * (2 + more), 2, engine=engine)
    with pytest.raises(error, match=message):
        model(torch.rand(4, 1))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@pytest.mark.parametrize("j", [0, 1])
def test_a_checkpointed_partition_that_changes_its_input(engine: str, j: int) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers.insert(j, InPlace())
    model = piped(layers, [j, 4 - j] if j else [2, 2], 2, engine=engine)
    with pytest.raises(RuntimeError, match=f"partition {j} changed its input in place.*checkpoint='never'"):
        model(torch.rand(4, 2))
