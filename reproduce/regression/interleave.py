"""Time the same work with several versions of a package, alternately.

`reproduce.regression.job` runs this module as a separate program. A *side* is a process that uses
the package in one folder. Everything else in the process belongs to this program. A *way* is a side
together with the arguments that are sent to the side. For each case of each restart, the program
prints a line of JSON with the samples of each way. The i-th samples of all ways were taken one
after another.

- Only one way runs at a time. The order of a case's rounds is random: for ways A and B, it is ABBA
  or BAAB. So a disturbance of a tenth of a second slows all ways down. The order in which sides
  start and warm up is also random.
- Each case chooses its cores. On one core, differences between cores do not change CPU times.
- Every process has its own speed, because its memory layout makes it faster or slower for its whole
  life. So all sides are forked from one process and start with the same layout. This process has
  imported torch, but not the package. The sides are forked again at each restart, so the remaining
  differences between them are random.
- All ways are warmed up before samples are taken.
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
Cases = Mapping[str, Mapping[str, Way]]  # case name -> way name -> way


def interleave(  # noqa: PLR0913
    start: Callable[[int], AbstractContextManager[Connection]],
    cases: Cases,
    *,
    rounds: int,
    restarts: int = 1,
    seed: int = 0,
    first: int = 0,
    least: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each case at each restart.

    A way is a version of the package and the arguments of a run. If some ways cannot run a case,
    the generator yields once which ways these are, and why. A case is dropped if fewer than `least`
    ways can run it. `start(i)` starts version i in a process, like `fork` does. `first` is the
    number of the first restart, because earlier jobs can have run the restarts before it.

    Raises:
        Error: A way fails that ran before.
    """
    draw = random.Random(f"{seed} {first}")
    running = {case: dict(ways) for case, ways in cases.items()}
    for restart in range(first, first + restarts):
        samples: dict[str, dict[str, list[Any]]] = {}
        with contextlib.ExitStack() as stack:
            sides: dict[int, Connection] = {}
            used = sorted(_sides_of(running))
            for i in draw.sample(used, len(used)):
                sides[i] = stack.enter_context(start(i))
            for case, ways in list(running.items()):
                unable = _warm_up(ways, sides, draw)
                if unable and restart:  # the case ran before, so this is an error
                    way, why = next(iter(unable.items()))
                    raise _no_longer(case, way, why)
                if unable:
                    yield {"case": case, "unable": unable}
                    running[case] = {way: ways[way] for way in ways if way not in unable}
                    if len(running[case]) < least:
                        del running[case]
            for case, ways in running.items():
                steps = {}
                for way, (side, asked) in ways.items():
                    steps[way] = partial(_ask, sides[side], asked, case, way)
                *_, samples[case] = turns(steps, rounds, draw)
        for case, found in samples.items():
            yield {"case": case, "restart": restart, "samples": found}


def _sides_of(cases: Cases) -> set[int]:
    """Return the numbers of the sides (versions of the package) that the cases use."""
    used = set()
    for ways in cases.values():
        for side, _ in ways.values():
            used.add(side)
    return used


def _warm_up(
    ways: Mapping[str, Way], sides: Mapping[int, Connection], draw: random.Random
) -> dict[str, Any]:
    """Make all ways (versions with arguments) prepare a case; return those that fail, and why."""
    order = draw.sample(list(ways), len(ways))
    for way in order:
        side, asked = ways[way]
        sides[side].send(asked)
    answers = {}
    for way in order:
        side, _ = ways[way]
        answers[way] = sides[side].recv()
    return {way: answers[way] for way in ways if answers[way] is not None}


def _ask(side: Connection, asked: Sequence[Any], case: str, way: str) -> Any:
    side.send(asked)
    answer = side.recv()
    if isinstance(answer, str):
        raise _no_longer(case, way, answer)
    return answer


def _no_longer(case: str, way: str, why: str) -> Error:
    return Error(f"{case} ran before, and no longer does in {way}: {why}")


@contextlib.contextmanager
def fork(folder: Path, package: str, maker: str) -> Iterator[Connection]:
    """Fork a process that imports the package in `folder`, and yield a connection to the process.

    `maker` names a function that returns another function. An example is "package.module:function".
    When the process receives arguments for the first time, it calls `maker` with them and sends
    None. When it receives the same arguments again, it calls the function that `maker` returned,
    and sends the result. If a call fails, the process sends the reason, a string.
    """
    process = Launched("fork", 1, _serve, folder, package, maker)
    try:
        yield process.links[0]
    except (EOFError, OSError) as error:
        # The frame refers to a buffer with the data that could not be sent.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # break the reference cycle of error, frame and caller's frame
        raise Error("a measuring process ended by itself") from None
    finally:
        process.close()


def _serve(_: int, link: Connection, folder: Path, package: str, maker: str) -> None:
    """Answer requests that arrive over the connection `link`, until it is closed."""
    os.dup2(2, 1)  # stdout is for the job's lines, not for what the package prints
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
                found = importlib.import_module(package)
                where = found.__file__ or next(iter(found.__path__))  # a namespace has no file
                if not Path(where).is_relative_to(folder):
                    raise ImportError(f"{package} comes from {where}: this program needs it itself")
                made[str(asked)] = getattr(importlib.import_module(module), name)(*asked)
        except Exception as error:  # an older version may lack what is asked for
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        link.send(answer)


def main(job: dict[str, Any]) -> None:
    """Run a job, and print a line for each case of each restart."""
    # This call imports modules that torch imports lazily, so that each fork does not import them
    # again.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    gc.freeze()
    folders = [Path(folder) for folder in job.pop("folders")]
    package = job.pop("package")
    maker = job.pop("maker")
    try:
        for line in interleave(lambda i: fork(folders[i], package, maker), **job):
            print(json.dumps(line), flush=True)
    except Error as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
