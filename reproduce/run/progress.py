"""Show what a run is doing and about how long it still takes, on one line of a terminal or as a line now and then."""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

SECONDS_BETWEEN_LINES = 30.0  # where the output is no terminal


@dataclass
class Job:
    """Plan steps of one row: how many are left, a guess of one step's cost to no unit, and the times taken."""

    left: int
    guess: float
    seconds: list[float] = field(default_factory=list)


class Progress:
    """Tell the current step and the time left, which is worked out from the steps that were done.

    A row's next step takes what its steps took. A row that has not run yet takes its guess, times what the
    guesses of the others turned out to be worth.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.jobs: dict[str, Job] = {}
        self.current: tuple[str, float] | None = None
        self.limits: dict[str, float] = {}  # by the jobs' prefix: the seconds that they take at most
        self.deadlines: dict[str, float] = {}  # of those that have begun: when they end at the latest
        self.terminal = self.stream.isatty()
        self.shown_at: float | None = None
        self.width = 0

    def plan(self, job: str, steps: int, guess: float) -> None:
        """Expect `steps` more steps of a job."""
        self.jobs[job] = Job(steps, guess)

    def drop(self, job: str) -> None:
        """Expect no more steps of a job."""
        self.jobs.pop(job, None)

    def skip(self, job: str, steps: int) -> None:
        """Expect so many fewer steps of a job: they were done before."""
        if job in self.jobs:
            self.jobs[job].left = max(0, self.jobs[job].left - steps)

    def limit(self, prefix: str, seconds: float) -> None:
        """Expect all jobs whose name starts with `prefix` to end so many seconds after they `begin`."""
        self.limits[prefix] = seconds

    def begin(self, prefix: str) -> None:
        """Say that the time of the jobs whose name starts with `prefix` begins now, where it has a limit."""
        if prefix in self.limits:
            self.deadlines[prefix] = self.clock() + self.limits[prefix]

    def start(self, job: str, text: str) -> None:
        """Say that a step of a job starts now; it ends when the next one starts."""
        self.stop()
        self.current = (job, self.clock())
        left = self.seconds_left()
        self.show(text if left is None else f"{text}, {duration(left)} left")

    def stop(self) -> None:
        """Say that the current step has ended."""
        if self.current is None:
            return
        job, started = self.current
        self.current = None
        if job in self.jobs:
            self.jobs[job].left = max(0, self.jobs[job].left - 1)
            self.jobs[job].seconds.append(self.clock() - started)

    def seconds_left(self) -> float | None:
        """Estimate the time left; None before anything was done."""
        done = [job for job in self.jobs.values() if job.seconds]
        if not done:
            return None
        worth = sum(statistics.median(job.seconds) for job in done) / sum(job.guess for job in done)
        groups = dict.fromkeys((*self.limits, ""), 0.0)
        for name, job in self.jobs.items():
            group = next((prefix for prefix in self.limits if name.startswith(prefix)), "")
            groups[group] += job.left * (statistics.median(job.seconds) if job.seconds else job.guess * worth)
        now = self.clock()
        ends = {group: max(0.0, self.deadlines[group] - now) for group in self.deadlines}
        return sum(min(seconds, ends.get(group, self.limits.get(group, seconds))) for group, seconds in groups.items())

    def show(self, text: str) -> None:
        """Show a status line in place of the last one; where the output is no terminal, only now and then."""
        now = self.clock()
        if self.terminal:
            columns = shutil.get_terminal_size().columns
            line = text[: columns - 1]
            self._write("\r" + line.ljust(min(self.width, columns - 1)))
            self.width = len(line)
        elif self.shown_at is None or now - self.shown_at >= SECONDS_BETWEEN_LINES:
            self._write(text + "\n")
            self.shown_at = now

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Take the status line of a terminal away."""
        if self.width:
            self._write("\r" + " " * self.width + "\r")
        self.width = 0

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def duration(seconds: float) -> str:
    """Write a time such as `2:05` in minutes and seconds, or `1:02:05` with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
