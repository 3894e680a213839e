"""Run the program `reproduce.regression.interleave`, and collect the results that it prints.

The program times two or three versions of a package, in processes that it forks. These processes
inherit its memory layout and hash seed, which can by chance favour one of the versions. So the
program is run several times, one after another. Each of these runs is called a *job*. A job
restarts the timed processes a few times.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reproduce.error import Error
from reproduce.machine.allocator import KEEP_FREED
from reproduce.machine.description import ROOT
from reproduce.regression.timed import Clock
from reproduce.regression.trees import TORCHGPIPE, Project, Trees

PROGRAM = "reproduce.regression.interleave"
RESTARTS_OF_A_PARENT = 7  # few, but a parent takes seconds to import torch
Lines = Generator[dict[str, Any], None, None]
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement: what is measured, and for how long.

    Attributes:
        cases: Maps the name of each case (timed piece of work) to the clock that the case chooses:
            CPU time or wall clock.
        restarts: How many times the timed processes are started.
        rounds: How many samples of a case each version takes after each restart.
        clock: The clock for all cases. None means that each case has the clock that it chooses.
        slow_down: A delay that is added to each sample of the new version, as a fraction of the
            median sample. With such a delay, one can check that a slow-down is noticed.
        seed: The seed of the random orders in which the versions run.
        project: The package that is measured.
    """

    cases: Mapping[str, Clock]
    restarts: int = 20
    rounds: int = 8
    clock: Clock | None = None
    slow_down: float = 0.0
    seed: int = 0
    project: Project = TORCHGPIPE


@dataclass
class Samples:
    """The samples of a case from the new version (`head`) and the old versions (`base`, `also`).

    A sample is the time of a step in seconds.

    Attributes:
        base: The samples of the old version: a list for each restart of the timed processes.
        head: The samples of the new version. In each restart, the first samples of `base` and
            `head` are a pair: they were taken one after the other. The same holds for the second
            samples, and so on.
        also: The samples of a second old version, from before `base`. Empty if there is none.
        unable: For each version that cannot run the case, the reason. The keys are among "base",
            "head" and "also".
        clock: The clock that times the case.
        busy: For each restart, whether other programs used the cores meanwhile.
    """

    base: list[list[float]] = field(default_factory=list)
    head: list[list[float]] = field(default_factory=list)
    also: list[list[float]] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)
    clock: Clock = "cpu"
    busy: list[bool] = field(default_factory=list)


def interleaved(versions: Trees, settings: Settings) -> Lines:
    """Run the jobs one after another, and yield the results that they print.

    A job is a process that forks the timed processes, restarts them a few times, and times all
    cases after each restart. When this generator is closed, the running job is killed.

    Raises:
        Error: A job has died before it was finished.
    """
    project = settings.project
    file = str(project.cases)
    clock = settings.clock
    cases = {}
    for case in settings.cases:
        ways = {
            "base": (0, (file, case, clock, 0.0)),
            "head": (1, (file, case, clock, settings.slow_down)),
        }
        if versions.also is not None:
            ways["also"] = (2, (file, case, clock, 0.0))
        cases[case] = ways
    for first in range(0, settings.restarts, RESTARTS_OF_A_PARENT):
        if not cases:
            return
        job = {
            "folders": [str(tree.folder) for tree in versions if tree is not None],
            "package": project.package,
            "maker": "reproduce.regression.timed:Timed",
            "cases": cases,
            "restarts": min(RESTARTS_OF_A_PARENT, settings.restarts - first),
            "first": first,
            "rounds": settings.rounds,
            "seed": settings.seed,
        }
        with contextlib.closing(in_turn(job, KEEP_FREED)) as lines:
            for line in lines:
                if "unable" in line:
                    _leave_out(cases, line["case"], line["unable"])
                yield line


def _leave_out(cases: dict[str, Any], case: str, unable: Mapping[str, str]) -> None:
    """Remove the versions that cannot run a case, and the case itself if only one version is left.

    Args:
        cases: Maps the name of each case (work to time) to the versions that can run the case. This
            dictionary is changed.
        case: The name of the case.
        unable: Maps the name of each version that cannot run the case to the reason.
    """
    left = {way: asked for way, asked in cases[case].items() if way not in unable}
    cases[case] = left
    if len(left) < 2:
        del cases[case]


def in_turn(
    job: Mapping[str, Any], environment: Mapping[str, str], program: str = PROGRAM
) -> Lines:
    """Run the program `reproduce.regression.interleave`, and yield the results that it prints.

    Args:
        job: The argument of the program's function `main`: what is timed, and how often.
        environment: Additional environment variables.
        program: Another module to run instead, which prints a line of JSON for each result.

    Raises:
        Error: The program has died before it was finished.
    """
    command = [sys.executable, "-W", "ignore", "-m", program, json.dumps(job)]
    # This checkout comes first. The packages that it needs may be in further folders.
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(folders)
    variables = {**os.environ, **ONE_THREAD, **environment, "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C is for this process, which ends the job and its forks as a group.
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
            code = process.wait()
        finally:
            _end(process)
        if code:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            reason = f": {said[-1]}" if said else ""
            raise Error(f"the measuring job ended with exit code {code}{reason}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it has forked, and wait until they have ended."""
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Reading reaches the end of the file when the last forked process has exited.
    while os.read(process.stdout.fileno(), 65536):
        pass
    process.stdout.close()
