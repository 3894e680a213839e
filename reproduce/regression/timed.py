"""Load cases (pieces of work to time) from a Python file, and time them.

The file is loaded by its path, and not imported from the measured package. So all versions of the
package that are compared run the same file.
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
# How many samples at the beginning are dropped. The very first takes several times as long.
WARM_UP = 2

# The cores of this process. The list is empty if cores cannot be chosen, for example on macOS.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


@dataclass(frozen=True)
class Case:
    """A piece of work that is timed, such as a training step.

    One execution of this work is called a step here.

    Attributes:
        name: The name of the case.
        prepare: A function that imports the package, makes everything that a step needs, and
            returns a function that runs the step.
        steps: How many consecutive steps are run for a sample. The sample is their mean time.
        clock: "cpu" measures CPU time, on one core. "wall" measures wall-clock time, on two cores,
            and is for cases that show whether devices work at the same time.
    """

    name: str
    prepare: Callable[[], Callable[[], object]]
    steps: int = 1
    clock: Clock = "cpu"


def load(path: Path) -> dict[str, Case]:
    """Run a Python file, and return a dictionary of the cases (work to time) in its list `CASES`.

    Raises:
        Error: The file cannot be run, or it has no list `CASES` of cases with different names.
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
    """A case (piece of work to time) that is ready to run. Calling this object takes a sample.

    A sample is the time of one execution of the work (a step), in seconds.

    Args:
        file: The path of the Python file that defines the case.
        name: The name of the case.
        clock: The clock that times the samples, or None for the clock that the case chooses.
        slow_down: A delay that is added to each sample, as a fraction of the median sample.
    """

    def __init__(self, file: str, name: str, clock: Clock | None, slow_down: float) -> None:
        self.case = load(Path(file))[name]
        clock = clock or self.case.clock
        self.now = CLOCKS[clock]
        # The first core serves most interrupts, so CPU time is measured on the last core.
        self.cores = CORES[-1:] if clock == "cpu" else CORES[:1] + CORES[-1:]
        self._pin()
        self.step = self.case.prepare()
        self.slow_down = slow_down
        self.own: list[float] = []  # seconds of each sample, without the delay
        for _ in range(WARM_UP):
            self()
        self.own.clear()

    def __call__(self) -> float:
        """Take a sample: run some steps, and return the mean time of a step in seconds."""
        self._pin()
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

    def _pin(self) -> None:
        """Let this thread run only on the cores of the case (set its CPU affinity).

        Threads and processes that this thread starts inherit the affinity.
        """
        if self.cores:
            os.sched_setaffinity(0, self.cores)
