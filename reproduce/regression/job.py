"""Run `reproduce.regression.interleave` on two trees, and collect what it prints.

Forked processes share the memory layout and hash seed of their parent, which may by chance favour one of the versions.
So several parents run one after another, each for a few restarts.
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
from reproduce.regression.trees import TORCHGPIPE, Project, Tree

RESTARTS_OF_A_PARENT = 7  # few, but a parent takes seconds to import torch
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}


@dataclass(frozen=True)
class Settings:
    """Say what is measured, and how long. `clock` replaces the cases' own; `slow_down` is a share of head's steps."""

    cases: Mapping[str, Clock]
    restarts: int = 20
    rounds: int = 8
    clock: Clock | None = None
    slow_down: float = 0.0
    seed: int = 0
    project: Project = TORCHGPIPE


@dataclass
class Samples:
    """Hold a case's seconds per step, in each restart those of both sides paired; its clock; why a side fails."""

    base: list[list[float]] = field(default_factory=list)
    head: list[list[float]] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)
    clock: Clock = "cpu"


def interleaved(
    base: Tree, head: Tree, settings: Settings
) -> Generator[dict[str, Any], None, None]:
    """Yield the lines of all jobs, one per parent, or raise `Error`. Their processes always end with this generator."""
    file, clock, delay = str(settings.project.cases), settings.clock, settings.slow_down
    cases = {
        x: {"base": (0, (file, x, clock, 0.0)), "head": (1, (file, x, clock, delay))}
        for x in settings.cases
    }
    for first in range(0, settings.restarts, RESTARTS_OF_A_PARENT):
        if not cases:
            return
        job = {
            "folders": [str(base.folder), str(head.folder)],
            "package": settings.project.package,
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
                    del cases[line["case"]]
                yield line


def in_turn(
    job: Mapping[str, Any], environment: Mapping[str, str]
) -> Generator[dict[str, Any], None, None]:
    """Run a job of `interleave.main` in one parent, and yield its lines. Raise `Error` if it ends before it is done."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "reproduce.regression.interleave",
        json.dumps(job),
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, **environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the job and its forks as a group
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
            raise Error(
                f"the measuring job ended with exit code {code}{': ' + said[-1] if said else ''}"
            )


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it forked, and return when they are gone."""
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while os.read(
        process.stdout.fileno(), 65536
    ):  # end of file comes when the last fork has exited
        pass
    process.stdout.close()
