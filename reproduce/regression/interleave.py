"""Time the same steps with two versions of torchgpipe, sample by sample in turn, in one job.

    python -m reproduce.regression.interleave BASE HEAD --restarts 20 --rounds 4

BASE and HEAD are folders with a torchgpipe in them; cases, models and clock are this checkout's. For each case of each
restart, a line of JSON holds the seconds per step of either side; the i-th of both ran next to each other.

- Only the side that is timed runs, and who goes first is drawn anew for each pair: a drift of the machine meets both.
  Who is started and warmed up first is drawn for each restart.
- A process has a speed of its own: where its memory happens to lie makes it quicker or slower for as long as it lives.
  Both sides are therefore forked off one process, which has imported torch but nothing of torchgpipe, so that they
  start out alike; and they are forked anew at each restart, so that what is left of it is drawn anew.
- Both sides have warmed up before either is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from reproduce.error import Error
from reproduce.regression.cases import CASES, Case, prepare

__all__ = ["NAMES", "Fork", "Side", "Timed", "folder_with_torchgpipe", "interleave", "main"]

NAMES = ("base", "head")
ENDED = "a measuring process ended by itself"
WARM_UP = 2  # samples: the first one compiles and allocates, and takes several times as long


class Side(Protocol):
    """Time cases with one torchgpipe."""

    def send(self, case: str) -> None:
        """Ask for a sample of a case, or to warm up for it where that was not asked before."""

    def receive(self) -> float | str | None:
        """Return seconds per step, why the case cannot run, or None: warmed up."""

    def close(self) -> None:
        """End it."""


def folder_with_torchgpipe(value: str) -> Path:
    """Return a command line's folder; refuse one in which no torchgpipe was installed."""
    if not (Path(value) / "torchgpipe").is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no torchgpipe in {value}; pip install --no-deps --target {value} torchgpipe==0.0.7"
        )
    return Path(value)


def interleave(
    start: Callable[[int], Side], cases: Sequence[str], *, restarts: int, rounds: int, seed: int, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each case of each restart; of a case that a side cannot run, once, why.

    `start(0)` starts the base, `start(1)` the head. Restarts are counted from `first`, for there may have been others.

    Raises:
        Error: a side cannot run a case that ran before.
    """
    order = random.Random(f"{seed} {first}")
    running = list(cases)
    for restart in range(first, first + restarts):
        turns = order.sample((0, 1), 2)
        started = {i: start(i) for i in turns}
        sides = [started[0], started[1]]
        try:
            for case in list(running):
                for i in turns:
                    sides[i].send(case)
                answers = {i: sides[i].receive() for i in turns}
                unable = {NAMES[i]: why for i, why in sorted(answers.items()) if why}
                if unable and restart:  # what it can run does not change: something went wrong, and is not left out
                    raise Error(_no_longer(case, *next(iter(unable.items()))))
                if unable:
                    running.remove(case)
                    yield {"case": case, "unable": unable}
            samples: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in running}
            for _ in range(rounds):
                for case, of_sides in samples.items():
                    for i in order.sample((0, 1), 2):
                        sides[i].send(case)
                        seconds = sides[i].receive()
                        if not isinstance(seconds, float):
                            raise Error(_no_longer(case, NAMES[i], seconds))
                        of_sides[i].append(seconds)
        finally:
            for side in sides:
                side.close()
        for case, of_sides in samples.items():
            yield {"case": case, "restart": restart, **dict(zip(NAMES, of_sides, strict=True))}


def _no_longer(case: str, name: str, why: object) -> str:
    return f"{case} ran before, and no longer does in {name}: {why}"


class Timed:
    """Time a case. With `slow_down`, each sample is followed by a delay of that share of the usual sample."""

    def __init__(self, case: Case, slow_down: float) -> None:
        self.case = case
        self.step = prepare(case)
        self.slow_down = slow_down
        self.own: list[float] = []
        for _ in range(WARM_UP):
            self.sample()
        self.own.clear()

    def sample(self) -> float:
        """Return the seconds per step of a sample."""
        began = time.perf_counter()
        for _ in range(self.case.steps):
            self.step()
        ran = time.perf_counter()
        self.own.append(ran - began)
        if self.slow_down:
            until = ran + self.slow_down * statistics.median_low(self.own)
            while time.perf_counter() < until:  # rather than to sleep, which takes longer than was asked for
                pass
        return (time.perf_counter() - began) / self.case.steps


class Fork:
    """A side in a process forked off this one."""

    def __init__(self, folder: Path, slow_down: float = 0.0) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._ours, theirs, folder, slow_down), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, case: str) -> None:
        """Ask for a sample of a case, or to warm up for it where that was not asked before."""
        try:
            self._ours.send(case)
        except OSError:
            raise Error(ENDED) from None

    def receive(self) -> float | str | None:
        """Return seconds per step, why the case cannot run, or None: warmed up."""
        try:
            answer: float | str | None = self._ours.recv()
        except (EOFError, OSError):
            raise Error(ENDED) from None
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(ours: Connection, theirs: Connection, folder: Path, slow_down: float) -> None:
    """Answer until there is nobody left to ask."""
    ours.close()
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    ready: dict[str, Timed] = {}
    while True:
        try:
            case = theirs.recv()
        except EOFError:
            return
        try:
            answer: float | str | None = None
            if case in ready:
                answer = ready[case].sample()
            else:
                _check_torchgpipe(folder)
                ready[case] = Timed(next(each for each in CASES if each.name == case), slow_down)
        except Exception as error:  # a base may lack what a case uses
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        theirs.send(answer)


def _check_torchgpipe(folder: Path) -> None:
    """Make sure that the right one is measured, whatever else is installed."""
    import torchgpipe

    assert Path(torchgpipe.__file__).resolve().parent.parent == folder.resolve(), torchgpipe.__file__


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each case of each restart."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="python -m reproduce.regression.interleave", description=__doc__.splitlines()[0]
    )
    parser.add_argument("base", type=folder_with_torchgpipe)
    parser.add_argument("head", type=folder_with_torchgpipe)
    parser.add_argument("--case", dest="cases", action="append", choices=names, help="default: all")
    parser.add_argument("--restarts", type=int, required=True, help="how often both are started anew")
    parser.add_argument("--first", type=int, default=0, help="number of the first restart, where there were others")
    parser.add_argument("--rounds", type=int, required=True, help="pairs of samples of each case per restart")
    parser.add_argument("--slow-down", type=float, default=0.0, help="delay of HEAD's steps, as a share of a step")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    options = parser.parse_args(arguments)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports what would else be imported by each fork
    gc.freeze()
    folders, delays = (options.base, options.head), (0.0, options.slow_down)
    try:
        for line in interleave(
            lambda i: Fork(folders[i], delays[i]),
            options.cases or names,
            restarts=options.restarts,
            rounds=options.rounds,
            seed=options.seed,
            first=options.first,
        ):
            print(json.dumps(line), flush=True)
    except Error as error:
        raise SystemExit(f"interleave: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    main()
