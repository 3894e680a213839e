"""Idleness: the rule, on a clock of the test's own; the CPU time that it goes by; and where a thread is."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchgpipe.distributed.liveness import idle
from torchgpipe.distributed.liveness.idle import Idle, cpu_time_of_descendants, place

PATIENCE = 120  # seconds; only a hang takes as long


class Look(NamedTuple):
    """What there is to see some seconds after the look before, and what is to be returned."""

    seconds: float
    cpu: float
    task: Any
    idle: float
    descendants: float = 0.0


TASK = "forward of micro-batch 0"
SILENCE = 4.0

LOOKS: dict[str, list[Look]] = {
    "a task that hangs": [Look(1, 0, TASK, 0), *(Look(1, 0.01, TASK, k) for k in range(9))],
    "clocks that are not read at once": [Look(1, -1e-6, TASK, 0), *(Look(1, -1e-6, TASK, k) for k in range(9))],
    "hangs after it has computed": [*[Look(1, 0.9, TASK, 0)] * 3, *(Look(1, 0.01, TASK, k) for k in range(9))],
    "slow but busy": [Look(1, 0.05, TASK, 0)] * 20,
    "one task after another": [Look(1, 0, k, 0) for k in range(20)],
    "no task": [Look(1, 0, None, 0)] * 20,
    "the same task after none": [
        *(Look(1, 0, TASK, k) for k in (0, 0, 1)), Look(1, 0, None, 0), *(Look(1, 0, TASK, k) for k in (0, 0, 1, 2)),
    ],
    "a process that was stopped": [
        *(Look(1, 0, TASK, k) for k in (0, 0, 1)), Look(9, 0, TASK, 0), *(Look(1, 0, TASK, k) for k in range(9)),
    ],
    "a descendant computes": [Look(1, 0, TASK, 0), *(Look(1, 0, TASK, k % 5, 0.03) for k in [0, 1, 2, 3, 0] * 3)],
    "a descendant has computed": [
        Look(1, 0, TASK, 0), Look(1, 0, TASK, 0, 1.0), *(Look(1, 0, TASK, k, 0.001) for k in range(1, 9)),
    ],
    "a descendant that is not counted any more": [
        Look(1, 0, TASK, 0), *(Look(1, 0, TASK, k, -2.0 * (k == 2)) for k in (0, 1, 2, 3, 0)),
        *(Look(1, 0, TASK, k) for k in range(9)),
    ],
}  # fmt: skip


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What clocks say, of real time, this process, a thread that looks, and descendants."""
    now = SimpleNamespace(time=1000.0, process=1000.0, thread=0.0, descendants=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.time)
    monkeypatch.setattr(time, "process_time", lambda: now.process)
    monkeypatch.setattr(time, "thread_time", lambda: now.thread)
    monkeypatch.setattr(idle, "cpu_time_of_descendants", lambda: now.descendants)
    return now


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_how_long_a_task_has_been_idle(looks: list[Look], clocks: SimpleNamespace) -> None:
    watch = Idle(SILENCE)
    for look in looks:
        clocks.time += look.seconds
        clocks.process += look.cpu + 0.5
        clocks.thread += 0.5  # what looking itself takes does not count
        clocks.descendants += look.descendants
        assert watch.look(look.task) == look.idle


def test_what_others_that_look_take_does_not_count(clocks: SimpleNamespace) -> None:
    """As if two threads looked, for two pipelines."""
    watches, found = [Idle(SILENCE), Idle(SILENCE)], []
    for second in range(6):
        clocks.time += 1
        for watch in watches:
            clocks.process += 0.5
            clocks.thread = (second + 1) * 0.5
            found.append(watch.look(TASK))
    assert found[-2:] == [SILENCE, SILENCE]


@pytest.mark.parametrize(("besides", "seconds"), [(0.0, 0.0), (0.1, 1.0)])
def test_what_other_threads_may_take(besides: float, seconds: float, clocks: SimpleNamespace) -> None:
    watch = Idle(SILENCE, besides)
    for cpu in (0, 0, 0.1):
        clocks.time, clocks.process = clocks.time + 1, clocks.process + cpu
        found = watch.look(TASK)
    assert found == seconds


BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()\n"
GRANDCHILD = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"]


def test_cpu_time_counts_who_works_and_still_does_when_they_have_ended() -> None:
    before = cpu_time_of_descendants()
    with subprocess.Popen(GRANDCHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        meanwhile = cpu_time_of_descendants()
        assert meanwhile - before >= 0.3 - 0.05  # the system counts hundredths
    assert cpu_time_of_descendants() > meanwhile - 0.005  # hundredths, which sum up to another last bit


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
