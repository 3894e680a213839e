"""Progress: one line that fits the terminal, or a line now and then, and a time left that follows what was done."""

import io

import pytest

from reproduce.run.progress import SECONDS_BETWEEN_LINES, Progress, duration


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def take(progress: Progress, job: str, seconds: float, steps: int = 1) -> None:
    for _ in range(steps):
        progress.start(job, job)
        progress.clock.time += seconds  # type: ignore[attr-defined]
        progress.stop()


def test_a_step_takes_what_its_steps_took_and_a_new_one_its_guess() -> None:
    progress = Progress(io.StringIO(), Clock())
    progress.plan("a", 4, guess=10.0)
    progress.plan("b", 7, guess=20.0)
    progress.skip("b", 2)
    assert progress.seconds_left() is None, "nothing is known at first"
    take(progress, "a", seconds=2.0)
    assert progress.seconds_left() == 3 * 2.0 + 5 * 4.0, "b is guessed to take twice as long as a"
    take(progress, "b", seconds=1.0, steps=2)
    assert progress.seconds_left() == 3 * 2.0 + 3 * 1.0
    progress.drop("a")
    assert progress.seconds_left() == 3.0


def test_a_time_limit_bounds_the_time_left() -> None:
    progress = Progress(io.StringIO(), clock := Clock())
    for job, steps in (("slow a", 100), ("other", 3)):
        progress.plan(job, steps, guess=1.0)
    progress.limit("slow ", 50.0)
    take(progress, "slow a", seconds=10.0)
    assert progress.seconds_left() == 50.0 + 3 * 10.0, "first steps are not among those that are limited"
    progress.begin("slow ")
    for seconds, left in ((10, 40.0), (100, 0.0)):
        clock.time += seconds
        assert progress.seconds_left() == left + 3 * 10.0


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress(stream := Terminal(), Clock())
    for text in ("x" * 200, "short", "y" * 40):
        progress.show(text)
    progress.say("stays")
    written = ["x" * 39, "short".ljust(39), "y" * 39, " " * 39, "stays\n"]
    assert stream.getvalue() == "\r" + "\r".join(written), "what stood there before is overwritten"


def test_elsewhere_a_line_is_written_now_and_then() -> None:
    progress = Progress(stream := io.StringIO(), Clock())
    progress.plan("a", 4, 1.0)
    take(progress, "a", seconds=SECONDS_BETWEEN_LINES / 2, steps=4)
    progress.clear()
    assert stream.getvalue() == "a\na, 0:30 left\n"


@pytest.mark.parametrize(("seconds", "text"), [(9.6, "0:10"), (59.7, "1:00"), (3600, "1:00:00"), (3725, "1:02:05")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
