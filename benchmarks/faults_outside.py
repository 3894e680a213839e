"""The outside process of `benchmarks.faults`: it starts the ranks of a case, and sees when and how each of them ends.

It also sees what is left of them: processes, sockets, files in shared memory. Where the system lets it, it has networks
and shared memory of its own, so that nothing else can be there.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.child import ROOT
from benchmarks.faults_cases import ENOUGH, RANKS, Case, Cell
from benchmarks.two_machines import NAMES, Link
from reproduce.error import Error

BEGIN = 60.0  # seconds in which it must have happened; four ranks start meanwhile
LATE = 8.0  # seconds in which ranks are waited for though they should have ended
STEPS = 4  # of a training that has to reach its end
SLOW = 120.0  # seconds for it

AFTERWARDS = {"stopped": signal.SIGCONT, "hang": signal.SIGTERM}
"""What is sent to a rank that cannot end by itself, when all others have ended; torchrun terminates it, too."""

_PR_SET_CHILD_SUBREAPER = 36
_CLOSING = ("04", "05", "06", "09", "0B")  # states of TCP in which a connection belongs to no process any more


class Ended(NamedTuple):
    """How a rank has ended: its exit code, or minus the number of a signal, and how many seconds after the fault."""

    code: int
    seconds: float


class Seen(NamedTuple):
    """What was seen of a case.

    Attributes:
        ended: the ranks that ended by themselves; the victim also if it did when it had been sent what is `AFTERWARDS`.
        errors: what each rank has printed as an error.
        left: what was there at the end, and not before.
        happened: whether the fault has come to pass.
    """

    ended: dict[int, Ended]
    errors: dict[int, str]
    left: list[str]
    happened: bool


class Outside:
    """Run cases, one after another, of ranks that are forked from one process.

    Attributes:
        private: whether this process has networks and shared memory of its own.
        silence: seconds that ranks may give no sign of life.
        more: seconds that they may take to end after that.
    """

    def __init__(self, *, private: bool, silence: float, more: float) -> None:
        self.private, self.silence, self.more = private, silence, more
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves becomes a child of this process
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if private:
            self._link = Link(networks=RANKS)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults_rank"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._heard = b""

    def close(self) -> None:
        """End the process that ranks are forked from, and these."""
        with self._server:
            self._server.kill()

    def run(self, cell: Cell) -> Seen:
        """Run a case until all of it has ended; end what does not end by itself."""
        fault, _, victim = cell
        before, limit = self._there(), self.silence + self.more + LATE
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            case = Case(*cell, self.silence, name, STEPS if cell.slow else ENOUGH, NAMES if fault == "link cut" else "")
            processes = self._ask(case)
            ends: dict[int, tuple[int, float]] = {}
            self._until(lambda: (folder / "fault").exists(), ends, BEGIN)
            happened = (folder / "fault").exists()
            at = float((folder / "fault").read_text()) if happened else time.monotonic()
            if fault == "link cut":
                self.cut({victim})
            elif fault == "all ranks stopped, and continued":
                _send(processes, signal.SIGSTOP)
                time.sleep(2 * self.silence)
                _send(processes, signal.SIGCONT)
            (folder / "done").touch()
            others = {*range(RANKS)} - {victim} if fault in AFTERWARDS else {*range(RANKS)}
            self._until(lambda: others <= ends.keys(), ends, SLOW if cell.slow else limit)
            if victim not in others:
                _send([processes[victim]], AFTERWARDS[fault])
                self._until(lambda: victim in ends, ends, limit)
            ended = {rank: Ended(code, when - at) for rank, (code, when) in sorted(ends.items())}
            left = [f"rank {rank}" for rank in range(RANKS) if rank not in ends]
            _send([process for rank, process in enumerate(processes) if rank not in ends], signal.SIGKILL)
            self._until(lambda: len(ends) == RANKS, ends, LATE)
            self.cut(set())
            left += sorted(self._there() - before)
            errors = {rank: (folder / f"{rank}.error").read_text(errors="replace") for rank in range(RANKS)}
        return Seen(ended, errors, left, happened)

    def cut(self, networks: set[int]) -> None:
        """Carry nothing any more to and from these networks."""
        if self.private:
            self._link.cut = networks

    def _ask(self, case: Case) -> list[int]:
        """Let a case begin; return the ranks' processes."""
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):
            self._server.stdin.write(f"{json.dumps(case)}\n".encode())
        processes: list[int] = self._line(BEGIN)
        return processes

    def _until(self, what: Callable[[], bool], ends: dict[int, tuple[int, float]], seconds: float) -> None:
        """Note ranks that end until something is so, all have ended, or time is over."""
        limit = time.monotonic() + seconds
        while not what() and len(ends) < RANKS and time.monotonic() < limit:
            if (said := self._line(0.005)) is not None:
                rank, code, at = said
                ends[rank] = code, at

    def _line(self, seconds: float) -> Any:
        """Return what the process that ranks are forked from says; `None` if it says nothing for so long."""
        assert self._server.stdout is not None
        limit = time.monotonic() + seconds
        while b"\n" not in self._heard:
            if not select.select([self._server.stdout], [], [], max(0.0, limit - time.monotonic()))[0]:
                return None
            if not (more := os.read(self._server.stdout.fileno(), 1 << 16)):
                raise Error("the process that ranks are forked from has ended")
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        return json.loads(line)

    def _there(self) -> set[str]:
        """Return what there is of processes that this one has started, and, if it is private, of sockets and memory."""
        there = {f"process {name}" for name in _descendants(os.getpid())}
        if self.private:
            there |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
            for network in ("", *NAMES):
                inside = ["nsenter", f"--net=/run/netns/{network}"] if network else []
                tables = ("/proc/net/tcp", "/proc/net/tcp6")
                rows = subprocess.run([*inside, "cat", *tables], capture_output=True, text=True, check=True).stdout
                cells = [row.split() for row in rows.splitlines()]
                there |= {f"socket {row[1]} to {row[2]}" for row in cells if row[0] != "sl" and row[3] not in _CLOSING}
        return there


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(of: int) -> set[str]:
    """Return the processes below one, as number and name."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            parents[int(folder.name)] = int(rest.split()[1]), name.partition("(")[2]
    found = {of}
    while more := {process for process, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return {f"{process} ({parents[process][1]})" for process in found - {of}}
