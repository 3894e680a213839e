"""Let ways to do the same work take turns, sample by sample, in one job, each with the torchgpipe of some folder.

`reproduce.regression.job` runs this as a program of its own. A *way* names a side, which is a folder's number, and what
that side is asked; all but torchgpipe is this checkout's. For each case of each restart the program prints a line of
JSON that holds the samples of each way; the i-th of all of them were taken next to each other.

- Only the way that is sampled runs. A case's rounds follow each other, A B B A or B A A B again and again: what makes
  the machine slow for a tenth of a second meets all. Who is started first, and who warms up first, is drawn as well.
- Where all processes share one core, CPU time of a process has no part of what else runs on this core, and of how the
  cores differ.
- A process has a speed of its own: where its memory happens to lie makes it quicker or slower for as long as it lives.
  The sides are therefore forked off one process, which has imported torch but nothing of torchgpipe, so that they
  start out alike; and they are forked anew at each restart, so that what is left of it is drawn anew.
- All ways have warmed up before any is sampled.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from reproduce.error import Error
from reproduce.run.engines.launch import Launched
from reproduce.run.turns import turns

Way = tuple[int, Sequence[Any]]
Cases = Mapping[str, Mapping[str, Way]]
"""The ways of each case, by name."""


def interleave(
    start: Callable[[int], AbstractContextManager[Connection]],
    cases: Cases,
    *,
    rounds: int,
    restarts: int = 1,
    seed: int = 0,
    first: int = 0,
    least: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each case of each restart; once, which ways cannot run a case, and why.

    Where these leave fewer than `least` ways, the case is left out. `start(i)` starts side i, as `fork` does. Restarts
    are counted from `first`, for there may have been others.

    Raises:
        Error: a way cannot run any more.
    """
    draw = random.Random(f"{seed} {first}")
    running = {case: dict(ways) for case, ways in cases.items()}
    for restart in range(first, first + restarts):
        samples: dict[str, dict[str, list[Any]]] = {}
        with contextlib.ExitStack() as stack:
            used = {side for ways in running.values() for side, _ in ways.values()}
            sides = {i: stack.enter_context(start(i)) for i in draw.sample(sorted(used), len(used))}
            for case, ways in list(running.items()):
                order = draw.sample(list(ways), len(ways))
                for side, asked in map(ways.__getitem__, order):
                    sides[side].send(asked)
                answers = {way: sides[ways[way][0]].recv() for way in order}
                unable = {way: answers[way] for way in ways if answers[way] is not None}
                if unable and restart:  # what a side can run does not change: something went wrong, and is not left out
                    raise _no_longer(case, *next(iter(unable.items())))
                if unable:
                    yield {"case": case, "unable": unable}
                    running[case] = {way: ways[way] for way in ways if way not in unable}
                    if len(running[case]) < least:
                        del running[case]
            for case, ways in running.items():
                steps = {way: partial(_ask, sides[side], asked, case, way) for way, (side, asked) in ways.items()}
                *_, samples[case] = turns(steps, rounds, draw)
        for case, found in samples.items():
            yield {"case": case, "restart": restart, "samples": found}


def _ask(side: Connection, asked: Sequence[Any], case: str, way: str) -> Any:
    side.send(asked)
    answer = side.recv()
    if isinstance(answer, str):
        raise _no_longer(case, way, answer)
    return answer


def _no_longer(case: str, way: str, why: str) -> Error:
    return Error(f"{case} ran before, and no longer does in {way}: {why}")


@contextlib.contextmanager
def fork(folder: Path, maker: str) -> Iterator[Connection]:
    """Fork a process with the torchgpipe in `folder`, and yield the connection to it.

    Sent arguments, it calls `maker`, such as "package.module:function", with them, and answers with None; sent them
    once more, with what comes of calling what was made. Instead it answers with a text where that cannot be: why.
    """
    process = Launched("fork", 1, _serve, folder, maker)
    try:
        yield process.links[0]
    except (EOFError, OSError) as error:
        traceback.clear_frames(error.__traceback__)  # one has a buffer open, with what could not be sent
        error.__traceback__ = None  # or this frame would refer to its caller's, and that to the error
        raise Error("a measuring process ended by itself") from None
    finally:
        process.close()


def _serve(_: int, link: Connection, folder: Path, maker: str) -> None:
    """Answer until there is nobody left to ask."""
    os.dup2(2, 1)  # what a version of torchgpipe prints is no line of the job
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    module, name = maker.split(":")
    made: dict[str, Callable[[], Any]] = {}
    while True:
        try:
            asked = link.recv()
        except EOFError:
            return
        answer = None
        try:
            if str(asked) in made:
                answer = made[str(asked)]()
            else:
                import torchgpipe

                assert Path(torchgpipe.__file__).is_relative_to(folder), torchgpipe.__file__  # and no other
                made[str(asked)] = getattr(importlib.import_module(module), name)(*asked)
        except Exception as error:  # an older torchgpipe may lack what is asked for
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        link.send(answer)


def main(job: dict[str, Any]) -> None:
    """Print a line for each case of each restart."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports what would else be imported by each fork
    gc.freeze()
    folders, maker = [Path(folder) for folder in job.pop("folders")], job.pop("maker")
    if job.pop("one_core", False) and hasattr(os, "sched_setaffinity"):  # macOS has it not
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the last core: the first serves most interrupts
    try:
        for line in interleave(lambda i: fork(folders[i], maker), **job):
            print(json.dumps(line), flush=True)
    except Error as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
