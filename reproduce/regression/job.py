"""Run `reproduce.regression.interleave` on two trees, and collect what it prints.

All that is forked off one process has its memory layout and its hash seed, which may happen to suit one of two
versions. So there are several such processes, one after another, of a few restarts each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reproduce.error import Error
from reproduce.machine.allocator import KEEP_FREED
from reproduce.machine.description import ROOT
from reproduce.regression.signals import undivided
from reproduce.regression.trees import Tree

__all__ = ["Samples", "Settings", "collect", "interleaved"]

RESTARTS_OF_A_PARENT = 7  # a parent takes seconds to start, as it imports torch
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}


@dataclass(frozen=True)
class Settings:
    """Say what is measured, and how long; `slow_down` plants a delay of that share of a step in the head's."""

    cases: Sequence[str]
    restarts: int = 20
    rounds: int = 4
    slow_down: float = 0.0
    seed: int = 0


@dataclass
class Samples:
    """Hold a case's seconds per step, a list of pairs for each restart; or why a side cannot run it."""

    base: list[list[float]] = field(default_factory=list)
    head: list[list[float]] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)


def interleaved(base: Tree, head: Tree, settings: Settings) -> Generator[dict[str, Any], None, None]:
    """Yield each line of the job. However this ends, the job's processes end with it.

    Raises:
        Error: it ended before it was done, or said something else.
    """
    cases = list(settings.cases)
    for first in range(0, settings.restarts, RESTARTS_OF_A_PARENT):
        if cases:
            with contextlib.closing(_of_a_parent(base, head, settings, cases, first)) as lines:
                for line in lines:
                    if "unable" in line:
                        cases.remove(line["case"])
                    yield line


def _of_a_parent(
    base: Tree, head: Tree, settings: Settings, cases: Sequence[str], first: int
) -> Generator[dict[str, Any], None, None]:
    """Yield the lines of the restarts from `first` on that are forked off one process."""
    restarts = min(RESTARTS_OF_A_PARENT, settings.restarts - first)
    command = [sys.executable, "-W", "ignore", "-m", "reproduce.regression.interleave",
               str(base.folder), str(head.folder),
               f"--restarts={restarts}", f"--first={first}", f"--rounds={settings.rounds}", f"--seed={settings.seed}",
               f"--slow-down={settings.slow_down}", *(f"--case={case}" for case in cases)]  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as ending:
        with undivided():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD, **KEEP_FREED, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends the job and its forks as a group
            )
            ending.callback(_end, process)
        assert process.stdout is not None
        for line in process.stdout:
            yield _read(line, cases)
        code = process.wait()
        if code:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            raise Error(f"the measuring job ended with exit code {code}{': ' + said[-1] if said else ''}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it forked, and return when they are gone."""
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while os.read(process.stdout.fileno(), 65536):  # its end is reached when the last fork is gone
        pass
    process.stdout.close()


def _read(line: str, cases: Sequence[str]) -> dict[str, Any]:
    """Return the line's content; a version of torchgpipe may print, and what it prints comes the same way."""
    with contextlib.suppress(ValueError):
        read = json.loads(line)
        if isinstance(read, dict) and read.get("case") in cases:
            return read
    raise Error(f"the measuring job printed {line.strip()[:60]!r}, which is no sample; torchgpipe must not print")


def collect(
    lines: Iterable[dict[str, Any]], cases: Sequence[str], told: Callable[[int], None] = lambda restart: None
) -> dict[str, Samples]:
    """Return the samples of each case; `told` is told how many restarts are finished."""
    found = {case: Samples() for case in cases}
    for line in lines:
        samples = found[line["case"]]
        if "unable" in line:
            samples.unable = line["unable"]
            continue
        samples.base.append(line["base"])
        samples.head.append(line["head"])
        told(line["restart"] + 1)
    return found
