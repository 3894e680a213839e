"""Time the same work with several versions of a package, alternately.

`reproduce.regression.job` runs this module as a separate program. The program uses these terms:

- A *case* is a piece of work that is timed, such as a training step.
- A *side* is a process that has imported one version of the package. All other modules are the same
  on all sides.
- A *way* (of running a case) is a side together with the arguments that are sent to the side.
- At a *restart*, all sides are started again.

For each case of each restart, the program prints a line of JSON. The line contains the samples of
each way, and whether other programs used the cores meanwhile. The first samples of all ways were
taken one after another, then the second samples of all ways, and so on.

The program keeps noise from favouring one of the ways:

- It runs one way at a time, in a random order that is then reversed: ABBA or BAAB for two ways. So
  a disturbance of a tenth of a second slows all ways down, and not only one of them. The order in
  which sides start and warm up is also random.
- It lets each case choose its cores. A case that is timed by CPU time always runs on the same core,
  because cores can differ in speed.
- It forks all sides from one process, which has imported torch but not the package. The memory
  layout makes a process faster or slower for its whole life, and forked processes start with the
  same layout. Each restart forks the sides again, so the differences that remain are random.
- It warms all ways up before it takes samples.
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
from typing import Any, NamedTuple

import torch

from reproduce.error import Error
from reproduce.machine.load import Load, too_busy
from reproduce.run.engines.launch import Launched
from reproduce.run.turns import turns

Way = tuple[int, Sequence[Any]]
Cases = Mapping[str, Mapping[str, Way]]  # maps a case's name, then a way's, to the way


class Sampling(NamedTuple):
    """How many samples to take, and in which order.

    A case is a piece of work to time. A way of running a case is a version of the package together
    with arguments.

    Attributes:
        rounds: How many samples each way takes after each restart of the timed processes.
        restarts: How many times the timed processes are started.
        seed: The seed of the random orders in which the ways run.
        first: The index of the first restart. It is above 0 if another process has already run the
            restarts before it.
        least: The number of ways that must be able to run a case. If fewer can, the case is left
            out, because there is nothing to compare.
    """

    rounds: int
    restarts: int = 1
    seed: int = 0
    first: int = 0
    least: int = 2


def interleave(
    start: Callable[[int], AbstractContextManager[Connection]], cases: Cases, sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Time all cases; for each restart of the timed processes, yield the samples of each case.

    A case (a piece of work) is run in several ways. A way is a version of the package together with
    arguments. If some ways cannot run a case, these ways are left out, and a dictionary with the
    reasons is yielded.

    Args:
        start: A function. `start(i)` starts a process that uses version i of the package.
        cases: Maps the name of each case to a dictionary of the ways to run the case. The keys of
            this dictionary are the names of the ways.
        sampling: How many samples to take, and in which order.

    Yields:
        Dictionaries that can be written as JSON. For each case of each restart, there is one with
        the keys "case", "restart", "samples" (a list for each way), and "busy" (whether other
        programs used the cores). For a case that some ways cannot run, there is one with the keys
        "case" and "unable" (the reason for each of these ways).

    Raises:
        Error: A way fails in a case that it has run before.
    """
    rounds, restarts, seed, first, least = sampling
    draw = random.Random(f"{seed} {first}")
    running = {case: dict(ways) for case, ways in cases.items()}
    load = Load()
    for restart in range(first, first + restarts):
        busy: dict[str, bool] = {}
        samples: dict[str, dict[str, list[Any]]] = {}
        with contextlib.ExitStack() as stack:
            sides: dict[int, Connection] = {}
            used = sorted(_sides_of(running))
            for i in draw.sample(used, len(used)):
                sides[i] = stack.enter_context(start(i))
            # The processes of the previous restart have ended. The CPU time of their children would
            # count as that of other programs. So measure the load from here.
            load.begin()
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
            load.round()  # the load of the warm-up is not used
            for case, ways in running.items():
                steps = {}
                for way, (side, asked) in ways.items():
                    steps[way] = partial(_ask, sides[side], asked, case, way)
                *_, samples[case] = turns(steps, rounds, draw)
                busy[case] = too_busy(load.round())
        for case, found in samples.items():
            yield {"case": case, "restart": restart, "samples": found, "busy": busy[case]}


def _sides_of(cases: Cases) -> set[int]:
    """Return the numbers of the sides that at least one case uses.

    A side is a process that has imported one version of the package.
    """
    used = set()
    for ways in cases.values():
        for side, _ in ways.values():
            used.add(side)
    return used


def _warm_up(
    ways: Mapping[str, Way], sides: Mapping[int, Connection], draw: random.Random
) -> dict[str, Any]:
    """Prepare a case (a piece of work to time) in each way in which it will be timed.

    A way is a version of the package together with arguments. Return a dictionary from the name of
    each way that failed to the reason.
    """
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

    The process prepares and times pieces of work. Over the connection, the caller sends a list of
    arguments, which defines a piece of work. The process answers each list:

    - When a list comes for the first time, the process prepares the work: it calls the function
      that `maker` names (such as "package.module:function") with the arguments, and keeps the
      function that this call returns. The answer is None.
    - When the same list comes again, the process calls the function that it has kept, and answers
      with the result, such as a time.
    - If a call fails, the answer is the reason, a string.
    """
    # A daemon could not have processes of its own, and some cases run over several ranks.
    process = Launched("fork", 1, _serve, folder, package, maker, daemon=False)
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
    """Run the forked process: answer the requests from the connection `link` until it is closed."""
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
    """Take the samples that `job` asks for, and print them as lines of JSON.

    `job` has the fields of `Sampling`, the cases (pieces of work to time), the name of the package,
    and the folders of the package's versions.
    """
    # torch imports some modules only when the first optimizer is made. Make an optimizer here, so
    # that the forked processes do not have to import these modules.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    gc.freeze()
    folders = [Path(folder) for folder in job.pop("folders")]
    package = job.pop("package")
    maker = job.pop("maker")
    cases = job.pop("cases")
    try:
        for line in interleave(lambda i: fork(folders[i], package, maker), cases, Sampling(**job)):
            print(json.dumps(line), flush=True)
    except Error as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
