"""Show the progress of a run: a progress bar on a terminal, and occasional lines elsewhere."""

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0  # the fewest seconds between two lines if there is no terminal
ECHO = 3  # the columns that the line leaves free: on Ctrl-C, the terminal writes ^C there

# By default, tqdm starts a monitor thread and creates a multiprocessing lock, which can start a
# process. Both disturb timings.
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())


@dataclass
class Job:
    """The steps of one row.

    Attributes:
        steps: The number of all steps.
        left: The number of steps that have not run yet.
        guess: The estimated cost of a step in comparison with the steps of other jobs.
        group: The name of the group of rows, or "".
        seconds: The time of each step that has run.
    """

    steps: int
    left: int
    guess: float
    group: str
    seconds: list[float] = field(default_factory=list)


class Progress:
    """A display of the finished rows, the time that is left, and the step that runs now.

    The time that is left is estimated. Further steps of a row are expected to take the median time
    of the row's steps so far. If no step of a row has run yet, the time of its steps is computed
    from `Job.guess`. The rows that have run show how many seconds a guess of 1 stands for.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.jobs: dict[str, Job] = {}
        self.current: tuple[str, float] | None = None
        self.limits: dict[str, float] = {}  # the time limit of each group, in seconds
        self.ends: dict[str, float] = {}  # for each group that has begun: when its time is over
        self.bar: tqdm[Any] | None = None
        self.shown_at: float | None = None

    def plan(
        self, job: str, steps: int, guess: float, group: str = "", limit: float = math.inf
    ) -> None:
        """Tell the display that a job (the steps of a row) is planned.

        Args:
            job: The name of the job.
            steps: The number of steps.
            guess: The estimated cost of a step in comparison with the steps of other jobs.
            group: The name of the job's group, if any.
            limit: The time limit of this group in seconds.
        """
        self.jobs[job] = Job(steps, steps, guess, group)
        self.limits[group] = limit

    def finish(self, name: str, steps: int | None = None) -> None:
        """Take `steps` off the expected steps of a job or a group; by default, all of them."""
        for job, planned in self.jobs.items():
            if name in (job, planned.group):
                planned.left = 0 if steps is None else max(0, planned.left - steps)

    def begin(self, group: str) -> None:
        """Note that a group begins now."""
        self.ends[group] = self.clock() + self.limits.get(group, math.inf)

    def start(self, job: str, text: str) -> None:
        """Note that a step of a job starts now. The step ends when the next step starts."""
        self.stop()
        self.current = (job, self.clock())
        self.show(text)

    def stop(self) -> None:
        """Note that the current step has ended."""
        if self.current is None:
            return
        name, started = self.current
        self.current = None
        job = self.jobs.get(name)
        if job is not None:
            job.left = max(0, job.left - 1)
            job.seconds.append(self.clock() - started)

    def seconds_left(self) -> float | None:
        """Estimate how many seconds all further steps take; return None if no step has run yet."""
        unit = self._seconds_of_guess()
        if unit is None:
            return None
        groups: dict[str, float] = {}
        for job in self.jobs.values():
            step = median(job.seconds) if job.seconds else job.guess * unit
            groups[job.group] = groups.get(job.group, 0.0) + job.left * step
        total = 0.0
        for group, seconds in groups.items():
            total += min(seconds, self._seconds_of_limit(group))
        return total

    def _seconds_of_guess(self) -> float | None:
        """Return the seconds of a step whose guess is 1, or None if no step has run yet."""
        done = [job for job in self.jobs.values() if job.seconds]
        if not done:
            return None
        seconds = sum(median(job.seconds) for job in done)
        return seconds / sum(job.guess for job in done)

    def _seconds_of_limit(self, group: str) -> float:
        """Return how many seconds are left until a group of jobs reaches its time limit."""
        if group not in self.ends:
            return self.limits[group]
        return max(0.0, self.ends[group] - self.clock())

    def show(self, text: str) -> None:
        """Replace the status line on a terminal. Elsewhere, write a line every 30 s at most."""
        if self.jobs:
            text = f"{self._state()}: {text}"
        if self.stream.isatty():
            self._draw(text)
        elif self.shown_at is None or self.clock() - self.shown_at >= SECONDS_BETWEEN_LINES:
            self._write(text + "\n")
            self.shown_at = self.clock()

    def _state(self) -> str:
        """Return a text that says how many rows are finished, and how much time is left."""
        jobs = self.jobs.values()
        done = sum(not job.left for job in jobs)
        state = f"{done}/{len(jobs)} rows"
        seconds = self.seconds_left()
        return state if seconds is None else f"{state}, {duration(seconds)} left"

    def _draw(self, text: str) -> None:
        """Draw the bar. Its length is the sum, over all rows, of the fraction of finished steps."""
        columns = shutil.get_terminal_size().columns - ECHO
        if self.bar is None:
            form = f"|{{bar:{columns // 9}}}| {{desc}}" if self.jobs else "{desc}"
            self.bar = tqdm(
                total=len(self.jobs), file=self.stream, leave=False, bar_format=form, position=0
            )
        self.bar.n = sum(1 - job.left / job.steps for job in self.jobs.values() if job.steps)
        self.bar.ncols = columns
        self.bar.set_description_str(text[:columns])

    def say(self, text: str) -> None:
        """Write a line that is not overwritten by the progress bar."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Remove the bar, and what the terminal has written on the same line, such as ^C."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
            columns = shutil.get_terminal_size().columns
            blank = " " * (columns - 1)
            self._write(f"\r{blank}\r")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def duration(seconds: float) -> str:
    """Format a time in the unit that suits it, such as 45 s, 12 min or 3 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 99.5:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h"
