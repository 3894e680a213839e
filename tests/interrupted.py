"""Programs that train and are interrupted (Ctrl-C); test_interrupts.py starts them.

    python -m tests.interrupted ENGINE LASTS INTERRUPTS PLACE…    in a task of each place
    python -m tests.interrupted                                   at any moment, over and over

A place is forward, recompute or backward. A task lasts `until-stopped`, that is until the pipeline was asked to
stop, or `for-ever`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import is_recomputing
from torchgpipe.relay import Relay

from .plain import piped


class Layer(nn.Linear):
    reached: Callable[[str], None] = staticmethod(lambda place: None)

    def forward(self, x: Tensor) -> Tensor:
        self.reached("recompute" if is_recomputing() else "forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.reached("backward"))
        return y


def trained(engine: str) -> Callable[[], list[Tensor]]:
    """Return a step, which returns the gradients."""
    layers = nn.Sequential(Layer(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model = piped(layers, [1, 1, 1], 4, checkpoint="always", engine=engine)
    x = torch.rand(8, 2)

    def step() -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return step


def in_tasks(engine: str, lasts: str, interrupts: int, places: list[str]) -> None:
    place, came = "", 0
    waiting, stopped = threading.Event(), threading.Event()

    def press() -> None:
        # Again and again: what comes when a thread is just about to wait does not wake it.
        while True:
            waiting.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    def interrupt(*_: object) -> None:
        # As often as was asked for, and the second time when the first one had its effect.
        nonlocal came
        if waiting.is_set() and (came == 0 or (came < interrupts and stopped.is_set())):
            came += 1
            raise KeyboardInterrupt

    def stop_and_note(self: Relay, error: BaseException, stop: Any = Relay.stop) -> None:
        stop(self, error)
        stopped.set()

    def reached(kind: str) -> None:
        nonlocal place
        if kind == place:
            place = ""
            print("running", kind, flush=True)
            waiting.set()
            stopped.wait() if lasts == "until-stopped" else time.sleep(1e6)

    Relay.stop = stop_and_note  # type: ignore[method-assign]
    Layer.reached = staticmethod(reached)
    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=press, daemon=True).start()
    step = trained(engine)
    expected = step()
    for place in places:  # noqa: B007 (reached looks at it)
        try:
            while True:
                step()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        waiting.clear()
        stopped.clear()
        came = 0
        if lasts == "until-stopped":
            assert all(map(torch.equal, step(), expected))
            print("trains again", flush=True)
    raise KeyboardInterrupt


def at_any_moment() -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    step = trained("workers")
    expected = step()
    # Of a step that nothing disturbed, so that most interrupts strike.
    seconds = min(timeit.repeat(step, number=1, repeat=10))
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        in_tasks(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        at_any_moment()
