"""Measure how much CPU time other programs use during a round of measurements.

In a round, each configuration that is measured runs one step. The numbers come from /proc on Linux.
On other systems, they are not known.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from reproduce.machine.devices import cores

PROC = Path("/proc")
# A round of measurements is disturbed if one of two shares of the cores is above its limit:
# - "others" is the share that other programs use;
# - "stolen" is the share that the host of a virtual machine takes.
# The limit for "others" was tried with a training step on both cores of a virtual machine. When
# other programs used 6 to 11 %, the step was as fast as usual. At 14 to 20 %, it was 14 to 26 %
# slower. At 50 %, it was half as fast. The limit for "stolen" has not been tried, because the host
# never took more than 0.7 %.
LIMITS = {"others": 0.1, "stolen": 0.02}
# The kernel measures CPU time in ticks of 10 ms, which is coarse for a short round. So a round that
# is shorter than `LEAST_SECONDS` is judged together with the round before it. If a run begins with
# short rounds, no shares of the cores are known for them. They get the shares of the first round
# for which shares are known (`Rounds.end` in `reproduce.run.rounds`).
LEAST_SECONDS = 1.0
# Matches a command in /proc, such as `python -m reproduce run`, with \0 at the end of each word.
A_RUN = re.compile(
    rb"[^\0]*python[^\0]*\0"
    rb"(?:.*\0)?"  # options of Python
    rb"(?:-m\0|[^\0]*/(?=reproduce\0))"
    rb"((?:reproduce\0(?:run|regression)\0|benchmarks\.).*)"
)
Counts = dict[str, float]
Shares = dict[str, float]


def too_busy(shares: Shares) -> bool:
    """Return whether other programs disturbed a round, by using too large a share of the CPU cores.

    Args:
        shares: The shares that `Load.round` has returned. Only "others" and "stolen" have limits.
            "pressure", the share of the time in which any program waited for a core, has none,
            because this program's own threads wait, too.
    """
    return any(shares.get(name, 0.0) > limit for name, limit in LIMITS.items())


class Load:
    """A measurement of how much CPU time other programs use in each round.

    Attributes:
        begun: The counts of CPU time (see `_count`) from which the next round is measured. They
            were taken at the end of the last long round, which took `LEAST_SECONDS` or more.
        earlier: The counts at the beginning of the last long round. If the next round is shorter
            than `LEAST_SECONDS`, it is measured from here, together with the last long round.
        told: The commands of other runs of this program that were already reported to the user.
    """

    def __init__(self) -> None:
        self.begun: Counts = {}
        self.earlier: Counts = {}
        self.told: set[str] = set()

    def begin(self) -> None:
        """Start the first round now."""
        self.begun = _count()
        self.earlier = {}

    def round(self) -> Shares:
        """End a round; return the shares of the machine that other programs used in this round.

        The result is a dictionary. The keys are the names of the shares, such as "others", which
        `UNITS` (in `reproduce.run.session`) explains. If the shares are not known, the dictionary
        is empty.
        """
        now = _count()
        if not now:
            return {}
        then = self.begun
        if then and now["time"] - then["time"] >= LEAST_SECONDS:
            self.begun = now
            self.earlier = then
        else:
            then = self.earlier  # judge a short round together with the round before it
        return _shares(then, now) if then else {}


def _shares(then: Counts, now: Counts) -> Shares:
    """Return the shares of the cores that others used between two calls of `_count`, by name."""
    seconds = now["time"] - then["time"]
    a_second = {name: (now[name] - then[name]) / seconds for name in now}
    have = cores()
    beyond = len(os.sched_getaffinity(0)) - have  # cores that a container's quota leaves to others
    others = a_second["busy"] - a_second["own"] - beyond
    shares = {"others": max(0.0, others) / have, "stolen": a_second["stolen"] / have}
    if "pressure" in a_second:
        shares["pressure"] = a_second["pressure"]
    return {name: round(share, 4) for name, share in shares.items()}


def other_runs() -> dict[int, str]:
    """Return other processes that run experiments, regressions or benchmarks.

    The result maps the id of each process to its command, without `python -m`.
    """
    found = {}
    ticks, ours = _processes()
    for pid in ticks.keys() - ours:
        try:
            command = (PROC / str(pid) / "cmdline").read_bytes()
        except OSError:  # the process has ended
            continue
        match = A_RUN.match(command)
        if match:
            words = match[1].rstrip(b"\0").replace(b"\0", b" ")
            found[pid] = words.decode(errors="replace")
    return found


def _count() -> Counts:
    """Return the clock's time and counts of CPU time until now, all in seconds.

    If the kernel does not count CPU time, the result is empty.

    - "time": the reading of a clock
    - "busy": the CPU time of all programs on the cores that this program may use
    - "stolen": the time that the host of a virtual machine took from these cores
    - "own": the CPU time of this program
    - "pressure": the time in which any program waited for a core
    """
    try:
        tick = os.sysconf("SC_CLK_TCK")
        here = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        text = (PROC / "stat").read_text()
    except (OSError, AttributeError):
        return {}
    totals = [0] * 8
    for line in text.splitlines():
        name, *numbers = line.split()
        if name in here:
            for i in range(8):
                totals[i] += int(numbers[i])
    user, nice, system, _, _, irq, softirq, stolen = [total / tick for total in totals]
    ticks, ours = _processes()
    own = sum(ticks.get(pid, 0) for pid in ours)
    counts = {
        "time": time.monotonic(),
        "busy": user + nice + system + irq + softirq,
        "stolen": stolen,
        "own": own / tick,
    }
    with contextlib.suppress(OSError):
        text = (PROC / "pressure" / "cpu").read_text()
        _, _, after = text.partition("total=")
        counts["pressure"] = int(after.split()[0]) / 1e6
    return counts


def _processes() -> tuple[dict[int, int], set[int]]:
    """Return the CPU time of each process by its id, and the ids of this program's processes.

    CPU times are in ticks of the kernel. They include the times of child processes that have ended.
    """
    ticks = {}
    parents = {}
    for pid, fields in process_fields():
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    ours: set[int] = set()
    more = {os.getpid()}
    while more:
        ours |= more
        more = {pid for pid, parent in parents.items() if parent in more}
    return ticks, ours


def process_fields(folder: Path | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield the id of each process of this machine, and the fields of its file /proc/ID/stat.

    The first field is the process's state, and the second field is the id of its parent. Nothing is
    yielded on systems without /proc, which only Linux has.

    Args:
        folder: A folder to read in place of /proc, such as /proc/ID/task for the threads of a
            process.
    """
    for path in (folder or PROC).glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # the process has ended
            continue
        _, _, after = text.rpartition(")")  # behind the name, which may have spaces
        yield int(path.parent.name), after.split()
