"""Progress: a bar that fits the terminal, or occasional lines; the time left is estimated from steps done."""

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
    progress.finish("b", 2)
    assert progress.seconds_left() is None, "nothing is known at first"
    take(progress, "a", seconds=2.0)
    assert progress.seconds_left() == 3 * 2.0 + 5 * 4.0, "b is guessed to take twice as long as a"
    take(progress, "b", seconds=1.0, steps=2)
    assert progress.seconds_left() == 3 * 2.0 + 3 * 1.0
    progress.finish("a")
    assert progress.seconds_left() == 3.0


def test_a_time_limit_bounds_the_time_left() -> None:
    progress = Progress(io.StringIO(), clock := Clock())
    progress.plan("a", 100, guess=1.0, group="slow", limit=50.0)
    progress.plan("other", 3, guess=1.0)
    take(progress, "a", seconds=10.0)
    assert progress.seconds_left() == 50.0 + 3 * 10.0, "first steps are not among those that are limited"
    progress.begin("slow")
    for seconds, left in ((10, 40.0), (100, 0.0)):
        clock.time += seconds
        assert progress.seconds_left() == left + 3 * 10.0
    progress.finish("slow")
    take(progress, "other", seconds=10.0)
    assert progress.seconds_left() == 2 * 10.0, "a group that has ended needs no time, whatever its limit"


BARS = {80: "####    | 1/2 rows, 60 s left: b, round 1 of 30", 40: "##  | 1/2 rows, 60 s left: b, round",
        30: "#5 | 1/2 rows, 60 s left:"}  # fmt: skip


@pytest.mark.parametrize(("columns", "last"), BARS.items())
def test_a_terminal_has_a_bar(columns: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(stream := Terminal(), Clock())
    progress.plan("a", 4, guess=1.0)
    progress.plan("b", 30, guess=1.0)
    take(progress, "a", seconds=2.0, steps=4)
    progress.start("b", "b, round 1 of 30")
    drawn = stream.getvalue().split("\r")
    assert drawn[-1].rstrip() == f"|{last}"
    assert max(map(len, drawn)) <= columns - 3, "a terminal may show ^C behind it"
    progress.say("stays")
    assert stream.getvalue().endswith("\r" + " " * (columns - 1) + "\rstays\n"), "the bar is gone"


def test_without_a_plan_there_is_text_and_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress(stream := Terminal(), Clock())
    for text in ("x" * 200, "short"):
        progress.show(text)
    assert stream.getvalue().split("\r")[-1] == "short".ljust(37) and "x" * 38 not in stream.getvalue()
    progress = Progress(file := io.StringIO(), Clock())
    progress.plan("a", 4, 1.0)
    take(progress, "a", seconds=SECONDS_BETWEEN_LINES / 2, steps=4)
    progress.clear()
    assert file.getvalue() == "0/1 rows: a\n0/1 rows, 30 s left: a\n"


def test_duration() -> None:
    texts = {9.6: "10 s", 59.7: "60 s", 125: "2 min", 5940: "99 min", 40000: "11 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
