"""Measure how much of the machine others have meanwhile, from Linux's /proc; elsewhere that is not known."""

import contextlib
import os
import re
import time
from pathlib import Path

from reproduce.machine.devices import cores

PROC = Path("/proc")
# Shares of the cores that this program may use. They were tried on a virtual machine, by a step that used both of its
# cores. Others always took about 6 %. Where they took 7 to 11 %, the step was as fast; at 14 to 20 % it was 14 to 26 %
# slower, and at 50 % half as fast. The host never took (stole) more than 0.7 %, so that limit was not tried.
LIMITS = {"others": 0.1, "stolen": 0.02}
LEAST_SECONDS = 1.0  # the kernel counts in ticks of 10 ms; shorter rounds are judged together with the one before
A_RUN = re.compile(
    rb"[^\0]*python[^\0]*\0(?:.*\0)?(?:-m\0|[^\0]*/(?=reproduce\0))((?:reproduce\0(?:run|regression)\0|benchmarks\.).*)"
)
Shares = dict[str, float]


def too_busy(shares: Shares) -> bool:
    """Say whether a round is disturbed, whatever its times. Pressure does not count: our own threads make some."""
    return any(shares.get(name, 0.0) > limit for name, limit in LIMITS.items())


class Load:
    """Tell how much others had in each round. `told`: the other runs that the user knows of."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}  # counts at the end of the last round that was not short
        self.earlier: dict[str, float] = {}  # and at its begin
        self.told: set[str] = set()

    def begin(self) -> None:
        """Say that rounds begin now."""
        self.begun, self.earlier = _count(), {}

    def round(self) -> Shares:
        """Return the shares of a round that ends now (`UNITS` has their meaning); empty where they are not known."""
        now, then = _count(), self.begun
        if now and then and now["time"] - then["time"] >= LEAST_SECONDS:
            self.begun, self.earlier = now, then
        elif not now or not (then := self.earlier):
            return {}
        a_second = {name: (now[name] - then[name]) / (now["time"] - then["time"]) for name in now}
        have = cores()  # a container's quota may leave some to others
        others = a_second["busy"] - a_second["own"] - (len(os.sched_getaffinity(0)) - have)
        shares = {
            **a_second,
            "others": max(0.0, others) / have,
            "stolen": a_second["stolen"] / have,
        }
        return {
            name: round(shares[name], 4)
            for name in ("others", "stolen", "pressure")
            if name in shares
        }


def other_runs() -> dict[int, str]:
    """Return which processes run other experiments, regressions or benchmarks, and their commands after python -m."""
    found, (ticks, ours) = {}, _processes()
    for pid in ticks.keys() - ours:
        with contextlib.suppress(OSError):  # it has ended
            if match := A_RUN.match((PROC / str(pid) / "cmdline").read_bytes()):
                found[pid] = match[1].rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return found


def _count() -> dict[str, float]:
    """Return seconds: of the clock, of CPU time, and in which a program waited; empty where the kernel has none."""
    try:
        tick, here = os.sysconf("SC_CLK_TCK"), {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
    except (OSError, AttributeError):
        return {}
    fields = [sum(int(line[i]) for line in lines if line[0] in here) / tick for i in range(1, 9)]
    user, nice, system, _, _, irq, softirq, stolen = fields
    ticks, ours = _processes()
    own = sum(ticks.get(pid, 0) for pid in ours) / tick
    counts = {
        "time": time.monotonic(),
        "busy": user + nice + system + irq + softirq,
        "stolen": stolen,
        "own": own,
    }
    with contextlib.suppress(OSError):
        counts["pressure"] = (
            int((PROC / "pressure" / "cpu").read_text().partition("total=")[2].split()[0]) / 1e6
        )
    return counts


def _processes() -> tuple[dict[int, int], set[int]]:
    """Return each process's ticks of CPU time, those of children that have ended included, and which are ours."""
    ticks, parents = {}, {}
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields, pid = path.read_text().rpartition(")")[2].split(), int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours, more = set(), {os.getpid()}
    while more:
        ours |= more
        more = {pid for pid, parent in parents.items() if parent in more}
    return ticks, ours
