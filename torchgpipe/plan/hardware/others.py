"""Measure how much of this process's cores other programs use, on Linux.

The numbers come from /proc/stat. On other systems, they are not known.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

STAT = Path("/proc/stat")
MUCH = 0.1
"""A measurement is disturbed if other programs use more than this share of the cores meanwhile.

With 6 to 11 %, a training step on all cores was as fast as usual. With 14 to 20 %, it was 14 to
26 % slower.
"""
LEAST_SECONDS = 1.0
"""The shortest measurement that is judged, because the kernel counts in ticks of 10 ms."""


@contextmanager
def warn_if_disturbed(what: str) -> Iterator[None]:
    """Warn if other programs use much of the cores within this context.

    Args:
        what: What is measured within the context, for the message.

    Warns:
        UserWarning: If other programs use much of the cores. The message says how much.
    """
    before, start = _busy_of_others(), perf_counter()
    yield
    after, seconds = _busy_of_others(), perf_counter() - start
    if before is None or after is None or seconds < LEAST_SECONDS:
        return
    share = (after - before) / seconds / len(os.sched_getaffinity(0))
    if share > MUCH:
        warnings.warn(
            f"other programs used {share:.0%} of the cores while {what} was measured, which "
            "makes the plan wrong; plan again when the machine is quiet",
            stacklevel=3,
        )


def _busy_of_others() -> float | None:
    """Return the seconds for which other programs used this process's cores; `None` if unknown."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = STAT.read_text().splitlines()
    except (OSError, AttributeError, ValueError):
        return None
    busy = 0
    for line in lines:
        name, *numbers = line.split()
        if name in cores:
            user, nice, system, _, _, irq, softirq = map(int, numbers[:7])
            busy += user + nice + system + irq + softirq
    own = os.times()
    return busy / tick - own.user - own.system
