"""Run a part (a measurement) in a process of its own with a time limit; say how it ended."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal

import torch
from msgspec import Struct

from benchmarks.gpu.frame.family import end
from benchmarks.gpu.frame.watch import Watch, Watched
from benchmarks.gpu.part import Context, Part
from reproduce.error import ENDING, handling

LOG = "log.txt"
PERIOD = 0.25
"""Seconds between two looks at the GPUs."""
MOST_GPUS = 255
"""The largest number that a process can return as its exit code."""
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
"""Matches the beginning of a log's line with which Python ends a traceback."""


class Outcome(Struct, frozen=True, omit_defaults=True):
    """How a part (a measurement) ended.

    Attributes:
        ended: How it ended:
            - "finished": the part's function `run` has returned.
            - "failed": `run` raised an error.
            - "killed": its process was killed at the end of its time, or died of a signal.
            - "interrupted": the whole command was interrupted.
            - "no time": it did not run, because no time was left.
            - "not run": it did not run, because a package is missing.
        seconds: How long the part ran.
        reason: Why the part did not finish, in one line.
        gpus: What the machine's GPUs did while the part ran.
    """

    ended: Literal["finished", "failed", "killed", "interrupted", "no time", "not run"]
    seconds: float = 0.0
    reason: str = ""
    gpus: list[Watched] = []


def run_part(part: Part, context: Context, limit: float) -> Outcome:
    """Run a part (a measurement) in a forked process, and return how the part ended.

    The forked process inherits all modules that this process has imported, so it starts at once.
    This process must not have initialized CUDA, because then the forked process could not use CUDA.

    If Ctrl-C interrupts this function, the forked process is killed, too.

    Args:
        part: The part to run.
        context: The argument of the part's `run`.
        limit: The seconds after which the forked process is killed.
    """
    began = time.monotonic()
    process = get_context("fork").Process(target=_run, args=(part, context), name=context.name)
    watch = Watch()
    try:
        _start(process)
        _wait(process, limit, watch)
        late = process.is_alive()
        if late:
            _write_stacks(process)
    finally:
        end(process)
    gpus = watch.found()
    seconds = time.monotonic() - began
    code = process.exitcode or 0
    if late:
        where = _where(context.folder / LOG)
        return Outcome("killed", seconds, f"it was not finished after {limit:.0f} s{where}", gpus)
    if code < 0:
        name = signal.Signals(-code).name
        return Outcome("killed", seconds, f"it ended by {name}", gpus)
    if code > 0:
        return Outcome("failed", seconds, _error(context.folder / LOG), gpus)
    return Outcome("finished", seconds, gpus=gpus)


def _start(process: ForkProcess) -> None:
    """Start a process, and hold back signals (such as that of Ctrl-C) until it has started.

    Otherwise, a signal could end this program when the process has started, but before the program
    knows which process to kill.
    """
    received: list[int] = []
    with handling(lambda number, frame: received.append(number)):
        process.start()
    for number in received:
        signal.raise_signal(number)


def _wait(process: ForkProcess, seconds: float, watch: Watch) -> None:
    """Wait until a process has ended, but at most `seconds`; watch the GPUs meanwhile."""
    until = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < until:
        watch.look()
        process.join(min(PERIOD, seconds))


def count_gpus() -> int:
    """Return the number of CUDA devices that PyTorch can use.

    PyTorch is asked in a forked process, because the question may initialize CUDA. If this process
    initialized CUDA, the processes that it forks later could not use CUDA.
    """
    process = get_context("fork").Process(target=_count_gpus)
    process.start()
    process.join()
    return max(0, process.exitcode or 0)


def _count_gpus() -> None:
    os._exit(min(torch.cuda.device_count(), MOST_GPUS) if torch.cuda.is_available() else 0)


def _run(part: Part, context: Context) -> None:
    """Run a part (a measurement) in this forked process, and exit with 1 if the part fails."""
    os.setsid()  # Ctrl-C is for the parent, which then kills this process
    log = (context.folder / LOG).open("w", buffering=1)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    for ending in ENDING:
        signal.signal(ending, signal.SIG_DFL)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)  # the parent sends it before it kills this process
    try:
        if context.size == "tiny":
            torch.set_num_threads(1)
        result = part.run(context)
        context.write(result)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    log.flush()
    os._exit(0)


def _write_stacks(process: ForkProcess) -> None:
    """Let the process of a part (a measurement) write the call stacks of its threads to its log."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    process.join(0.5)


def _lines(log: Path) -> list[str]:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _error(log: Path) -> str:
    """Return the last line of a log that names an error or, if no line does, the last line."""
    lines = _lines(log)
    for line in reversed(lines):
        if ERROR.match(line):
            return line
    return lines[-1] if lines else "it wrote no log"


def _where(log: Path) -> str:
    """Say at which line of code a part (a measurement) was, from the call stacks in its log."""
    where = ""
    for title, line in pairwise(_lines(log)):
        if title.startswith("Current thread"):
            where = f", and was at {line.strip()}"
    return where
