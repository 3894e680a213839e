"""Workers that hang: the caller gets one error that says where, and the pipeline works again. Slow ones are left alone.

Each test waits for about one silence. None passes or fails by how long something takes.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, hang, is_recomputing

from ..ledger import assert_eventually, assert_no_thread_more
from ..plain import piped

pytestmark = pytest.mark.usefixtures("without_ranks")

SILENCE = 1.0
PATIENCE = 120  # seconds; only a hang takes as long
M = 3

Reached = Callable[[str, int], object]


class Layer(nn.Module):
    """A linear layer that calls `reached` with what it is in, and with the number of its partition."""

    calls: Tensor
    reached: Reached = staticmethod(lambda kind, j: None)

    def __init__(self, j: int) -> None:
        super().__init__()
        self.linear, self.j = nn.Linear(2, 2), j
        self.register_buffer("calls", torch.zeros(1))  # put back for a recomputation

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Layer.reached("recomputation" if is_recomputing() else "forward", self.j)
        return Passes.apply(self.linear(x), self.j)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, j: int) -> Tensor:
        ctx.j = j
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Layer.reached("backward", ctx.j)
        return grad, None


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reached], None]]:
    """Return what sets the function that layers call."""
    monkeypatch.setattr("torchgpipe.hang.GRACE", 0.2)
    yield lambda function: monkeypatch.setattr(Layer, "reached", staticmethod(function))


def pipeline(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(*map(Layer, range(3)))
    return piped(layers, [1, 1, 1], M, **{"checkpoint": "always", "engine": "workers", "silence": SILENCE, **options})


def step(model: Any) -> list[Tensor]:
    """Run a mini-batch, in a thread of its own; return gradients."""
    result: list[Any] = []

    def run() -> None:
        try:
            model.zero_grad()
            model(torch.linspace(-1, 1, 2 * M * 2).view(-1, 2)).sum().backward()
            result.append([p.grad.clone() for p in model.parameters()])
        except BaseException as error:
            result.append(error)

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    caller.join(PATIENCE)
    assert result, "it hangs"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def assert_works(model: Any) -> None:
    assert all(map(torch.equal, step(model), step(pipeline(silence=None))))


class Once:
    """Wait at one place, the first time that it is reached: in C, or in a loop of Python code."""

    def __init__(self, kind: str, j: int, *, in_c: bool) -> None:
        self.place, self.in_c = (kind, j), in_c
        self.over, self.ended = threading.Event(), threading.Event()
        self.came = False

    def __call__(self, *place: object) -> None:
        if place == self.place and not self.came:
            self.came = True
            try:
                while not self.over.wait(None if self.in_c else 0.05):
                    pass
            finally:
                self.ended.set()


# What hangs, and in which micro-batch that is.
KINDS = {"forward": 0, "recomputation": M - 1, "backward": M - 1}


@pytest.mark.parametrize("in_c", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize("j", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_hangs(kind: str, j: int, in_c: bool, reached: Any) -> None:
    model, hangs = pipeline(), Once(kind, j, in_c=in_c)
    held = {id(x) for x in (*model.parameters(), *model.buffers())}
    reached(hangs)
    expected = (
        f"partition {j} hangs in {kind} of micro-batch {KINDS[kind]}: nothing has been computed for 1 s .*; "
        rf"its thread is in __call__, test_hang.py:\d+(, in forward of Layer, test_hang.py:\d+)?"
    )
    with pytest.raises(TimeoutError, match=expected):
        step(model)

    assert hangs.ended.is_set() is not in_c
    assert {id(x) for x in (*model.parameters(), *model.buffers())} == held
    assert_works(model)
    hangs.over.set()
    assert hangs.ended.wait(PATIENCE)
    assert_works(model)
    assert {id(x) for x in (*model.parameters(), *model.buffers())} == held


def test_an_error_counts_more_than_a_hang_after_it(reached: Any) -> None:
    model, hangs, forwards = pipeline(), Once("second forward", 0, in_c=True), Counter[int]()

    def reach(kind: str, j: int) -> None:
        forwards[j] += 1
        if j == 1:
            assert_eventually(lambda: hangs.came, lambda: forwards)
            raise ZeroDivisionError("first")
        hangs("second forward" if forwards[j] == 2 else kind, j)

    reached(reach)
    with pytest.raises(ZeroDivisionError, match="first"):
        step(model)
    hangs.over.set()


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def wait_for_a_process() -> None:
    code = f"import time\nwhile time.process_time() < {1.5 * SILENCE}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


# What takes longer than the silence, and what does not hang for all that.
SLOW: dict[str, tuple[tuple[str, int], Callable[[], object]]] = {
    "it computes": (("forward", 0), lambda: burn(1.5 * SILENCE)),
    "it computes in backward": (("backward", 1), lambda: burn(1.5 * SILENCE)),
    "it waits for a process that computes": (("forward", 1), wait_for_a_process),
    "it waits for the last partition": (("backward", 2), lambda: time.sleep(1.5 * SILENCE)),
}


@pytest.mark.parametrize("place, slow", SLOW.values(), ids=SLOW)
def test_a_task_that_is_slow(place: tuple[str, int], slow: Callable[[], object], reached: Any) -> None:
    places = [place]

    def once(*place: object) -> None:
        if place in places:
            places.clear()
            slow()

    model = pipeline()
    reached(once)
    assert_works(model)
    assert not places


def test_pauses_between_calls() -> None:
    model = pipeline()
    x = torch.rand(M, 2)
    for _ in range(2):
        output = model(x)
        time.sleep(1.5 * SILENCE)
        output.sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "both backwards ran to their ends"


def test_others_do_not_hang(reached: Any) -> None:
    """Another pipeline at its side, and another caller of the same one, in turn."""
    model, hangs = pipeline(), Once("backward", 0, in_c=True)
    expected = step(pipeline(silence=None))
    reached(hangs)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            step(model)
        except TimeoutError as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    while not hangs.came:
        time.sleep(0.01)
    for _ in range(5):
        assert all(map(torch.equal, step(pipeline()), expected))
    caller.join(PATIENCE)
    assert len(errors) == 1
    hangs.over.set()


def test_mini_batches_before_and_after_go_backward(reached: Any) -> None:
    """Also while the thread that was given up still hangs in the layers."""
    model, plain, hangs = pipeline(), pipeline(silence=None), Once("forward", 1, in_c=True)
    x = torch.rand(2 * M, 2)
    for each in (model, plain):
        before = each(x).sum()
        if each is model:
            reached(hangs)
            with pytest.raises(TimeoutError, match="partition 1 hangs"):
                model(x)
        after = each(2 * x).sum()
        after.backward()
        before.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    hangs.over.set()


@pytest.mark.parametrize("silence", [SILENCE / 2, None], ids=["its own silence", "the outer one's"])
def test_a_pipeline_among_the_layers_hangs(
    silence: float | None, reached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up its own task, and the outer one goes on with all its threads."""
    given_up = []

    def give_up(workers: Any, *args: Any) -> None:
        given_up.append(workers)
        original(workers, *args)

    def nested() -> GPipe:
        torch.manual_seed(0)
        inner = piped(nn.Sequential(Layer(0), Layer(9)), [1, 1], 2, engine="workers", silence=silence)
        return piped(nn.Sequential(inner, Layer(1)), [1, 1], M, engine="workers", silence=SILENCE)

    original = hang._give_up
    monkeypatch.setattr(hang, "_give_up", give_up)
    model, hangs = nested(), Once("forward", 0, in_c=True)
    reached(hangs)
    x = torch.rand(2 * M, 2)
    with pytest.raises(TimeoutError, match="partition 0 hangs in forward of micro-batch 0"):
        model(x)
    assert torch.equal(model(x), nested()(x))
    inner: Any = model[0]
    assert given_up == [inner._engine.workers]
    hangs.over.set()


@pytest.mark.parametrize("silence", [None, SILENCE])
@pytest.mark.parametrize("how", ["an exception", "the end"])
def test_a_thread_that_has_died_between_two_calls(how: str, silence: float | None) -> None:
    before = {*threading.enumerate()}
    model = pipeline(silence=silence)
    step(model)
    (thread,) = [t for t in {*threading.enumerate()} - before if t.name == "gpipe-partition-1"]
    if how == "an exception":
        # It comes when the thread has got its next program.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        with pytest.raises(SystemExit):
            step(model)
    else:
        model._engine.workers._inboxes[1].put(None)
        thread.join(PATIENCE)
    assert_works(model)


def test_the_watch_ends_with_the_pipeline_and_when_nobody_wants_it(reached: Any) -> None:
    before = {*threading.enumerate()}

    def watches() -> int:
        return sum(thread.name == "gpipe-watch" for thread in {*threading.enumerate()} - before)

    model = pipeline(silence=None)
    for silence, count in [(None, 0), (SILENCE, 1), (2 * SILENCE, 1), (None, 0), (SILENCE, 1)]:
        model.silence = silence
        step(model)
        assert_eventually(lambda count=count: watches() == count, watches)  # type: ignore[misc]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert_no_thread_more(before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_the_same_silence(copied: Callable[[Any], Any], reached: Any) -> None:
    model, hangs = copied(pipeline()), Once("forward", 0, in_c=False)
    assert model.silence == SILENCE
    reached(hangs)
    with pytest.raises(TimeoutError):
        step(model)
