"""Ctrl-C while the pipeline runs: each program is a process of its own, which is sent signals."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PATIENCE = 300  # seconds; only a hang takes as long
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals to a process")

# A program that trains, says which task is running, and is interrupted there: a task that lasts until the pipeline was
# asked to stop, or for ever.
TRAINS = """
    import os, signal, sys, threading, time
    import torch
    from torch import nn
    from torchgpipe import GPipe, is_recomputing
    from torchgpipe.relay import Relay

    engine, lasts, interrupts, *places = sys.argv[1:]
    place, came = None, 0
    waiting, stopped = threading.Event(), threading.Event()

    def press():
        # Again and again: what comes when a thread is just about to wait does not wake it.
        while True:
            waiting.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    def interrupt(number, frame):
        # As often as was asked for, and the second time when the first one had its effect.
        global came
        if waiting.is_set() and (came == 0 or came < int(interrupts) and stopped.is_set()):
            came += 1
            raise KeyboardInterrupt

    def stop_and_note(self, error, stop=Relay.stop):
        stop(self, error)
        stopped.set()

    Relay.stop = stop_and_note
    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=press, daemon=True).start()

    def here(kind):
        global place
        if kind == place:
            place = None
            print("running", kind, flush=True)
            waiting.set()
            stopped.wait() if lasts == "until stopped" else time.sleep(1e6)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            here("backward")
            return grad

    class Layer(nn.Linear):
        def forward(self, x):
            here("recompute" if is_recomputing() else "forward")
            return Slow.apply(super().forward(x))

    model = GPipe(nn.Sequential(Layer(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu", "cpu"], chunks=3,
                  checkpoint="always", engine=engine)
    x = torch.rand(6, 2)

    def step():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    for place in places:
        try:
            while True:
                step()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        waiting.clear()
        stopped.clear()
        came = 0
        if lasts == "until stopped":
            assert all(map(torch.equal, step(), expected))
            print("trains again", flush=True)
    raise KeyboardInterrupt
"""

# A program that is interrupted at any moment, over and over.
INTERRUPTED = """
    import random, signal, time
    import torch
    from torch import nn
    from torchgpipe import GPipe

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    model = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), [1, 1, 1], devices=["cpu"] * 3, chunks=4,
                  checkpoint="always", engine="workers")
    x = torch.rand(4, 2)

    def step():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def timed():
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    expected = step()
    seconds = min(timed() for _ in range(10))  # of one that nothing disturbed, so that most interrupts strike
    moments, interrupts = random.Random(0), 0
    while interrupts < 300:
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, seconds))
            step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupts += 1
    assert all(map(torch.equal, step(), expected))
    print("trains again")
"""


def run(program: str, folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run a program; return its exit code, its output's lines, and its errors."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_an_interrupt_from_the_keyboard(tmp_path: Path) -> None:
    places = ["forward", "recompute", "backward"]
    code, printed, errors = run(TRAINS, tmp_path, "workers", "until stopped", "1", *places)

    expected = [[f"running {place}", "interrupted", "trains again"] for place in places]
    assert printed == [line for lines in expected for line in lines], errors
    assert code != 0
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize(("engine", "interrupts"), [("graph", "1"), ("workers", "2")])
def test_an_interrupt_during_a_task_that_does_not_end(tmp_path: Path, engine: str, interrupts: str) -> None:
    """In this thread the first interrupt ends it; where another thread is waited for, the second."""
    code, printed, errors = run(TRAINS, tmp_path, engine, "for ever", interrupts, "forward")

    assert printed == ["running forward", "interrupted"], errors
    assert code != 0


@pytest.mark.slow
def test_an_interrupt_at_any_moment(tmp_path: Path) -> None:
    code, printed, errors = run(INTERRUPTED, tmp_path)

    assert (code, printed) == (0, ["trains again"]), errors
