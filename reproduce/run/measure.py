"""Time whole training steps of several rows in turn, so that a machine's drift hits all rows alike.

A round is one step of every row, in an order drawn anew for each round. A step is timed from a moment when every
device is idle to the next such moment, and every time is kept: rows are compared within rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from reproduce.machine.devices import Devices
from reproduce.run.failure import Failure, explain
from reproduce.run.training import Training

__all__ = ["Sample", "in_turn", "time_step"]


class Sample(NamedTuple):
    """Hold one timed step, or how it failed."""

    row: str
    round: int
    seconds: float
    loss: float
    failure: Failure | None = None


def time_step(training: Training, devices: Devices) -> tuple[float, float]:
    """Run one whole step and return its time in seconds and its loss."""
    devices.synchronize()
    started = time.perf_counter()
    loss = training.step()
    devices.synchronize()
    seconds = time.perf_counter() - started
    return seconds, float(loss)


def in_turn(
    trainings: Mapping[str, Training],
    devices: Devices,
    *,
    rounds: int,
    seed: int,
    enough: Callable[[int], bool] = lambda done: False,
    before: Callable[[int, str], None] = lambda round, row: None,
) -> Iterator[Sample]:
    """Yield a sample of every row in round 0, then of every row in round 1, and so on.

    A row that raises yields its failure, and is left out from then on. `enough` is asked after every round, with
    the number of rounds done; `before` is told what comes next.
    """
    order = random.Random(seed)
    names = list(trainings)
    for done in range(rounds):
        for name in order.sample(names, len(names)):
            before(done, name)
            seconds, loss, failure = math.nan, math.nan, None
            try:
                seconds, loss = time_step(trainings[name], devices)
            except Exception as error:
                names.remove(name)
                failure = explain(error)
            yield Sample(name, done, seconds, loss, failure)
        if enough(done + 1):
            return
