"""Time the cases of a project. The file with the cases is loaded by its path.

So both compared versions of the package run the same file.
"""

import os
import runpy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reproduce.error import Error

Clock = Literal["cpu", "wall"]
# CPU time of all threads of the process, or wall-clock time.
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
WARM_UP = 2  # the number of warm-up samples: the first one takes several times as long
# The cores of this process. The list is empty if cores cannot be chosen, for example on macOS.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


@dataclass(frozen=True)
class Case:
    """A case: the work that is timed.

    `prepare()` imports the package, makes everything that a step needs, and returns the step. A
    sample is the mean of `steps` consecutive steps. A sample is measured in CPU time on one core.
    If the case has to show whether devices work at the same time, a sample is measured in
    wall-clock time on two cores.
    """

    name: str
    prepare: Callable[[], Callable[[], object]]
    steps: int = 1
    clock: Clock = "cpu"


def load(path: Path) -> dict[str, Case]:
    """Return the cases of a file, by name.

    Raises:
        Error: The file has no list `CASES` of cases with different names.
    """
    try:
        listed = runpy.run_path(str(path))["CASES"]
        cases = {case.name: case for case in listed if isinstance(case, Case)}
        assert 0 < len(cases) == len(listed), (
            "CASES has something else, or a name twice, or nothing"
        )
        return cases
    except Exception as error:
        needed = (
            "it needs CASES, a list of reproduce.regression.timed.Case, which import the package "
            "in prepare()"
        )
        raise Error(f"--cases {path}: {type(error).__name__}: {error}; {needed}") from None


class Timed:
    """A prepared case that is timed by `clock` or, if that is None, by the case's own clock.

    `slow_down` adds a delay to each sample, as a fraction of the median sample.
    """

    def __init__(self, file: str, name: str, clock: Clock | None, slow_down: float) -> None:
        self.case = load(Path(file))[name]
        clock = clock or self.case.clock
        self.now = CLOCKS[clock]
        # The first core serves most interrupts, so CPU time is measured on the last core.
        self.cores = CORES[-1:] if clock == "cpu" else CORES[:1] + CORES[-1:]
        self.step = self.case.prepare()
        self.slow_down = slow_down
        self.own: list[float] = []  # seconds of each sample, without the delay
        for _ in range(WARM_UP):
            self()
        self.own.clear()

    def __call__(self) -> float:
        """Run a sample, and return its seconds per step."""
        if self.cores:
            # This pins the current thread to its cores (CPU affinity). The first sample starts the
            # worker threads, which inherit these cores.
            os.sched_setaffinity(0, self.cores)
        began = self.now()
        for _ in range(self.case.steps):
            self.step()
        ran = self.now()
        self.own.append(ran - began)
        if self.slow_down:
            until = ran + self.slow_down * statistics.median_low(self.own)
            while self.now() < until:  # `sleep` uses no CPU time, and may take longer
                pass
        return (self.now() - began) / self.case.steps
