"""Idleness: the rule, on a clock of the test's own; the CPU time that it goes by; and where a thread is."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchgpipe import idle
from torchgpipe.idle import Idle, cpu_time, place

PATIENCE = 120  # seconds; only a hang takes as long


class Look(NamedTuple):
    """What there is to see some seconds after the look before, and what is to be returned."""

    seconds: float
    cpu: float
    task: Any
    idle: float


TASK = "forward of micro-batch 0"

LOOKS: dict[str, list[Look]] = {
    "a task that hangs": [Look(1, 0, TASK, 0), *(Look(1, 0.01, TASK, k) for k in range(1, 9))],
    "clocks that are not read at once": [Look(1, -1e-6, TASK, 0), *(Look(1, -1e-6, TASK, k) for k in range(1, 9))],
    "hangs after it has computed": [*[Look(1, 0.9, TASK, 0)] * 3, Look(1, 0.01, TASK, 1), Look(1, 0.01, TASK, 2)],
    "slow but busy": [Look(1, 0.05, TASK, 0)] * 20,
    "one task after another": [Look(1, 0, k, 0) for k in range(20)],
    "no task": [Look(1, 0, None, 0)] * 20,
    "the same task after none": [Look(1, 0, TASK, 0), Look(1, 0, None, 0), Look(1, 0, TASK, 0), Look(1, 0, TASK, 1)],
    "a process that was stopped": [Look(1, 0, TASK, 0), Look(1, 0, TASK, 1), Look(9, 0, TASK, 0), Look(1, 0, TASK, 1)],
    "a descendant that is not counted any more": [
        Look(1, 9, TASK, 0), Look(1, 0, TASK, 1), Look(1, -5, TASK, 0), Look(1, 0.5, TASK, 0), Look(1, 0, TASK, 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_how_long_a_task_has_been_idle(looks: list[Look], monkeypatch: pytest.MonkeyPatch) -> None:
    now = cpu = own = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "thread_time", lambda: own)
    monkeypatch.setattr(idle, "cpu_time", lambda: cpu + own)
    watch = Idle(16)
    for look in looks:
        now += look.seconds
        cpu += look.cpu
        own += 0.5  # what looking itself takes does not count
        assert watch.look(look.task) == look.idle


@pytest.mark.parametrize(("besides", "seconds"), [(0.0, 0.0), (0.1, 1.0)])
def test_what_other_threads_may_take(besides: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = cpu = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(idle, "cpu_time", lambda: cpu)
    watch = Idle(16, besides)
    watch.look(TASK)
    now, cpu = now + 1, cpu + 0.1
    assert watch.look(TASK) == seconds


BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
WAIT = "print(flush=True)\ninput()\n"
CHILD = [sys.executable, "-c", BURN + WAIT]
GRANDCHILD = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN + WAIT!r}])"]


@contextmanager
def process(command: list[str]) -> Iterator[None]:
    """Run a process until it waits, and then within this."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield


@contextmanager
def thread() -> Iterator[None]:
    def burn() -> None:
        while time.thread_time() < 0.3:
            pass

    burning = threading.Thread(target=burn)
    burning.start()
    burning.join(PATIENCE)
    yield


WORK: dict[str, Callable[[], Any]] = {
    "a thread": thread,
    "a child": lambda: process(CHILD),
    "a grandchild": lambda: process(GRANDCHILD),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_cpu_time_counts_who_works_and_still_does_when_they_have_ended(work: Callable[[], Any]) -> None:
    before = cpu_time()
    with work():
        meanwhile = cpu_time()
        assert meanwhile - before >= 0.3 - 0.05  # the system counts hundredths
    assert cpu_time() >= meanwhile


class Waits(nn.Module):
    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self.wait = wait

    def forward(self, x: Any) -> Any:
        self.wait()
        return x


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Callable[[], object]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.wait()
        return grad, None


def hooked(wait: Callable[[], object]) -> nn.Module:
    def hook(*_: object) -> None:
        wait()

    layers = nn.Sequential(nn.Tanh())
    layers[0].register_forward_hook(hook)
    return layers


X = torch.ones(1, requires_grad=True)
HERE = r"test_idle.py:\d+"

PLACES: dict[str, tuple[Callable[[Callable[[], object]], object], str]] = {
    "a layer": (lambda wait: Waits(wait)(X), f"forward of Waits, {HERE}"),
    "a function that a layer calls": (
        lambda wait: Waits(lambda: wait())(X),
        f"<lambda>, {HERE}, in forward of Waits, {HERE}",
    ),
    "a hook": (lambda wait: hooked(wait)(X), rf"hook, {HERE}, in forward of Sequential, container.py:\d+"),
    "a backward": (lambda wait: WaitsInBackward.apply(X, wait).backward(), f"backward, {HERE}"),
    "no layer": (lambda wait: wait(), rf"<lambda>, {HERE}"),
}


@pytest.mark.parametrize("run, said", PLACES.values(), ids=PLACES)
def test_where_a_thread_is(run: Callable[[Callable[[], object]], object], said: str) -> None:
    over = threading.Event()
    hanging = threading.Thread(target=lambda: run(over.wait))
    hanging.start()
    try:
        assert hanging.ident is not None
        end = time.monotonic() + PATIENCE
        while not re.fullmatch(said, found := place(hanging.ident)) and time.monotonic() < end:
            time.sleep(0.01)
        assert re.fullmatch(said, found)
    finally:
        over.set()
        hanging.join(PATIENCE)


def test_a_thread_that_has_ended_is_nowhere() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join(PATIENCE)
    assert ended.ident is not None
    assert place(ended.ident) == "outside of Python code"
