"""Show the progress of a run: by a bar on a terminal, and by a line every few seconds elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0
"""The fewest seconds between two lines if the output is not a terminal."""
ECHO = 3
"""The number of columns that stay free, because the terminal writes ^C there on Ctrl-C."""

# By default, tqdm starts a monitor thread. It also creates a multiprocessing lock, which can start
# a process. Switch both off, because they would disturb timings.
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())


@dataclass
class Job:
    """The steps of one row (configuration) in the progress display.

    Attributes:
        left: The number of steps that have not run yet.
        guess: The estimated seconds of a step, or None if nothing is known.
        group: The name of the group to which the row belongs, or "".
        seconds: The seconds of each step that has run, without steps that are not typical, such as
            building the model.
    """

    left: int
    guess: float | None
    group: str
    seconds: list[float] = field(default_factory=list)


class Progress:
    """A display of the time that is left, and of the step that runs now.

    The time that is left is an estimate. A further step of a row (configuration) is expected to
    take the median time of the row's steps so far. If no step of the row has run yet, a guess is
    used, multiplied by the ratio (real time / guessed time) of the rows that have run.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.jobs: dict[str, Job] = {}
        self.current: tuple[str, float, bool] | None = None
        self.bar: tqdm[Any] | None = None
        self.began_at: float | None = None
        self.shown_at: float | None = None

    def plan(self, job: str, steps: int, guess: float | None, group: str = "") -> None:
        """Tell the display that a job (the steps of a row) is planned.

        Args:
            job: The name of the job.
            steps: The number of steps.
            guess: The estimated seconds of a step, or None if nothing is known.
            group: The name of the group of rows to which the job belongs, or "".
        """
        self.jobs[job] = Job(steps, guess, group)

    def expect(self, job: str, steps: int) -> None:
        """Set how many further steps of a job (the steps of a row) are expected."""
        self.jobs[job].left = steps

    def finish(self, name: str, steps: int | None = None) -> None:
        """Note that a job, or each job of a group, will not run all of its planned steps.

        A job is the steps of a row. Lower the number of its further steps by `steps`. If `steps` is
        None, no further step will run.
        """
        for job, planned in self.jobs.items():
            if name in (job, planned.group):
                planned.left = 0 if steps is None else max(0, planned.left - steps)

    def start(self, job: str, text: str, *, typical: bool = True) -> None:
        """Note that a step of a job starts now. The step ends when the next step starts.

        Args:
            job: The name of the job (the steps of a row).
            text: What the display says about the step.
            typical: Whether further steps will take about as long as this one. Building a model,
                for example, is not typical.
        """
        self.stop()
        self.current = (job, self.clock(), typical)
        self.show(text)

    def stop(self) -> None:
        """Note that the current step has ended."""
        if self.current is None:
            return
        name, started, typical = self.current
        self.current = None
        job = self.jobs.get(name)
        if job is not None:
            job.left = max(0, job.left - 1)
            if typical:
                job.seconds.append(self.clock() - started)

    def seconds_left(self) -> float | None:
        """Estimate how many seconds all further steps take together.

        Return None if nothing is known about one of them.
        """
        total = 0.0
        for name, job in self.jobs.items():
            if job.left:
                step = self.step_seconds([name])
                if step is None:
                    return None
                total += job.left * step
        return total

    def step_seconds(self, jobs: Iterable[str]) -> float | None:
        """Estimate how many seconds it takes to run one step of each of the given jobs.

        Return None if nothing is known about one of the jobs.
        """
        total = 0.0
        for name in jobs:
            job = self.jobs[name]
            if job.seconds:
                total += median(job.seconds)
            elif job.guess is None:
                return None
            else:
                total += job.guess * self._correction()
        return total

    def _correction(self) -> float:
        """Return the ratio (real time / guessed time) of a step, for all rows that have run a step.

        The guesses for rows (configurations) that have run no step yet are multiplied by this
        ratio.
        """
        guessed = took = 0.0
        for job in self.jobs.values():
            if job.seconds and job.guess is not None:
                guessed += job.guess
                took += median(job.seconds)
        return took / guessed if guessed else 1.0

    def show_later(self) -> None:
        """Delay the next progress line by a few seconds.

        So no line is written for work that takes only a few seconds.
        """
        self.shown_at = self.clock()

    def show(self, text: str) -> None:
        """Show a text about the step that runs now, with an estimate of the time that is left.

        On a terminal, the text replaces the previous text. Elsewhere, the text is written as a new
        line, at most every few seconds.
        """
        if self.began_at is None:
            self.began_at = self.clock()
        if self.jobs:
            seconds = self.seconds_left()
            left = "time left unknown" if seconds is None else f"{duration(seconds)} left"
            text = f"{left}: {text}"
        if self.stream.isatty():
            self._draw(text)
        elif self.shown_at is None or self.clock() - self.shown_at >= SECONDS_BETWEEN_LINES:
            self._write(text + "\n")
            self.shown_at = self.clock()

    def _draw(self, text: str) -> None:
        """Draw the progress bar with a text beside it.

        The length of the bar shows which share of the expected time has passed.
        """
        columns = shutil.get_terminal_size().columns - ECHO
        if self.bar is None:
            form = f"|{{bar:{columns // 9}}}| {{desc}}" if self.jobs else "{desc}"
            self.bar = tqdm(total=1, file=self.stream, leave=False, bar_format=form, position=0)
        self.bar.n = self._share()
        self.bar.ncols = columns
        self.bar.set_description_str(text[:columns])

    def _share(self) -> float:
        """Return the share of the expected total time that has passed, from 0 to 1."""
        seconds = self.seconds_left()
        if seconds is None or self.began_at is None:
            return 0.0
        over = self.clock() - self.began_at
        return over / (over + seconds) if over else 0.0

    def say(self, text: str) -> None:
        """Write a line of text that stays: the progress bar does not overwrite it."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Remove the progress bar, and all other text on its terminal line, such as ^C."""
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
    """Format a duration in seconds, minutes or hours, such as 45 s, 12 min or 3 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 99.5:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h"
