"""Warn if other programs use the CPU while something is timed, because this makes the times wrong.

The file /proc/stat says how busy each core is. It exists on Linux only. On other systems, there is
no warning.
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
    """Warn at the end of this context if other programs have used much of this process's cores.

    Args:
        what: What is measured within the context, for the warning's text.

    Warns:
        UserWarning: If other programs have used a share of the cores above `MUCH`. The warning
            names the share.
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
    """Return for how many seconds other programs have used this process's cores since boot.

    The seconds of all these cores are added up. The result is `None` if the system does not tell
    them.
    """
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
