"""Time the same steps with two versions of torchgpipe, sample by sample in turn, in one job.

`reproduce.regression.job` runs this as a program of its own. Both versions lie in a folder each; cases, models and
clock are this checkout's. For each case of each restart the program prints a line of JSON that holds the seconds per
step of either side; the i-th of both ran next to each other.

- Only the side that is timed runs. A case's pairs follow each other, A B B A A B and so on: what makes the machine slow
  for a tenth of a second meets both. Who goes first is drawn for each case of each restart; who is started and warmed
  up first, for each restart.
- The seconds are CPU time of all of a process's threads, and all processes share one core. So what else runs on this
  core, and how the cores differ, is no part of them. With the clock "wall" they are seconds of a clock, on all cores.
- A process has a speed of its own: where its memory happens to lie makes it quicker or slower for as long as it lives.
  Both sides are therefore forked off one process, which has imported torch but nothing of torchgpipe, so that they
  start out alike; and they are forked anew at each restart, so that what is left of it is drawn anew.
- Both sides have warmed up before either is timed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from reproduce.error import Error
from reproduce.regression.cases import CASES, Case, Clock, prepare

NAMES = ("base", "head")
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
WARM_UP = 2  # samples: the first one compiles and allocates, and takes several times as long


def interleave(
    start: Callable[[int], AbstractContextManager[Connection]],
    cases: Sequence[str],
    *,
    restarts: int,
    rounds: int,
    seed: int,
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each case of each restart; of a case that a side cannot run, once, why.

    `start(0)` starts the base, `start(1)` the head, as `fork` does. Restarts are counted from `first`, for there may
    have been others.

    Raises:
        Error: a side cannot run a case that ran before.
    """
    order = random.Random(f"{seed} {first}")
    running = list(cases)
    for restart in range(first, first + restarts):
        samples: dict[str, tuple[list[float], list[float]]] = {}
        with contextlib.ExitStack() as stack:
            turns = order.sample((0, 1), 2)
            sides = {i: stack.enter_context(start(i)) for i in turns}
            for case in list(running):
                for i in turns:
                    sides[i].send(case)
                unable = {NAMES[i]: why for i in (0, 1) if (why := sides[i].recv())}
                if not unable:
                    samples[case] = ([], [])
                    continue
                if restart:  # what a side can run does not change: something went wrong, and is not left out
                    raise _no_longer(case, *next(iter(unable.items())))
                running.remove(case)
                yield {"case": case, "unable": unable}
            for case, seconds in samples.items():
                turns = order.sample((0, 1), 2)
                for _ in range(rounds):
                    for i in turns:
                        sides[i].send(case)
                        answer = sides[i].recv()
                        if isinstance(answer, str):
                            raise _no_longer(case, NAMES[i], answer)
                        seconds[i].append(answer)
                    turns.reverse()
        for case, (base, head) in samples.items():
            yield {"case": case, "restart": restart, "base": base, "head": head}


def _no_longer(case: str, name: str, why: str) -> Error:
    return Error(f"{case} ran before, and no longer does in {name}: {why}")


@contextlib.contextmanager
def fork(folder: Path, clock: Clock = "cpu", slow_down: float = 0.0) -> Iterator[Connection]:
    """Fork a process that measures the torchgpipe in `folder`, and yield the connection to it.

    Sent a case's name, it answers with seconds per step; the first time with None, when it has warmed up, or with a
    text: why it cannot run the case.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(ours, theirs, folder, clock, slow_down), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    except (EOFError, OSError) as error:
        traceback.clear_frames(error.__traceback__)  # one has a buffer open, with what could not be sent
        error.__traceback__ = None  # or this frame would refer to its caller's, and that to the error
        raise Error("a measuring process ended by itself") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(ours: Connection, theirs: Connection, folder: Path, clock: Clock, slow_down: float) -> None:
    """Answer until there is nobody left to ask."""
    ours.close()
    os.dup2(2, 1)  # what a version of torchgpipe prints is no line of the job
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    ready: dict[str, Timed] = {}
    while True:
        try:
            case = theirs.recv()
        except EOFError:
            return
        answer: float | str | None = None
        try:
            if case in ready:
                answer = ready[case].sample()
            else:
                import torchgpipe

                assert Path(torchgpipe.__file__).is_relative_to(folder), torchgpipe.__file__  # and no other
                ready[case] = Timed(next(each for each in CASES if each.name == case), clock, slow_down)
        except Exception as error:  # a base may lack what a case uses
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        theirs.send(answer)


class Timed:
    """Time a case. With `slow_down`, each sample is followed by a delay of that share of the usual sample."""

    def __init__(self, case: Case, clock: Clock, slow_down: float) -> None:
        self.case = case
        self.now = CLOCKS[clock]
        self.step = prepare(case)
        self.slow_down = slow_down
        self.own: list[float] = []  # seconds of each sample, without the delay
        for _ in range(WARM_UP):
            self.sample()
        self.own.clear()

    def sample(self) -> float:
        """Return the seconds per step of a sample."""
        began = self.now()
        for _ in range(self.case.steps):
            self.step()
        ran = self.now()
        self.own.append(ran - began)
        if self.slow_down:
            until = ran + self.slow_down * statistics.median_low(self.own)
            while self.now() < until:  # to sleep takes no CPU time, and longer than was asked for
                pass
        return (self.now() - began) / self.case.steps


def main(job: dict[str, Any]) -> None:
    """Print a line for each case of each restart."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports what would else be imported by each fork
    gc.freeze()
    folders, clock, delays = job.pop("folders"), job.pop("clock"), (0.0, job.pop("slow_down"))
    if clock == "cpu" and hasattr(os, "sched_setaffinity"):  # macOS has it not
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the last core: the first serves most interrupts
    try:
        for line in interleave(lambda i: fork(Path(folders[i]), clock, delays[i]), **job):
            print(json.dumps(line), flush=True)
    except Error as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
