"""Tests of what a run does around its steps: progress, failures, and the utilization of GPUs.

Progress is shown as a bar, or as a line from time to time, with the remaining time. A failure is
shown in one line. The utilization of GPUs is read from NVIDIA's driver.
"""

import io
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.error import Error
from reproduce.run.engines.failure import explain
from reproduce.run.progress import SECONDS_BETWEEN_LINES, Progress, duration
from reproduce.run.timed import ask_driver
from torchgpipe.timeline.stopwatch import Mark

from ...library.ledger import assert_eventually


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


def test_a_step_takes_what_its_steps_took_and_a_new_one_its_corrected_guess() -> None:
    progress = Progress(io.StringIO(), Clock())
    progress.plan("a", 4, guess=10.0)
    progress.plan("b", 7, guess=20.0)
    progress.finish("b", 2)
    assert progress.seconds_left() == 4 * 10.0 + 5 * 20.0, "before the start, guesses count"
    take(progress, "a", seconds=2.0)
    assert progress.seconds_left() == 3 * 2.0 + 5 * 4.0, "a was five times faster; b will be, too"
    take(progress, "b", seconds=1.0, steps=2)
    assert progress.seconds_left() == 3 * 2.0 + 3 * 1.0
    progress.finish("a")
    assert progress.seconds_left() == 3.0
    progress.expect("a", 5)
    assert progress.seconds_left() == 5 * 2.0 + 3.0
    assert progress.step_seconds(["a", "b"]) == 2.0 + 1.0


def test_building_a_model_does_not_tell_how_long_steps_take() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), clock)
    progress.plan("a", 3, guess=2.0)
    progress.start("a", "building", typical=False)
    clock.time += 60.0
    progress.stop()
    assert progress.seconds_left() == 2 * 2.0


def test_a_group_is_finished_with_all_its_jobs() -> None:
    progress = Progress(io.StringIO(), Clock())
    for job, group in (("a", "one"), ("b", "one"), ("c", "other")):
        progress.plan(job, 3, guess=1.0, group=group)
    progress.finish("one")
    assert progress.seconds_left() == 3.0


def test_time_that_is_not_known_is_not_told() -> None:
    file = io.StringIO()
    progress = Progress(file, Clock())
    progress.plan("a", 2, guess=10.0)
    progress.plan("b", 1, guess=None)
    assert progress.seconds_left() is None
    progress.show("row 2 of 2: b")
    assert file.getvalue() == "time left unknown: row 2 of 2: b\n"
    take(progress, "b", seconds=7.0)
    assert progress.seconds_left() == 2 * 10.0, "without a guess, b corrects no other guess"


BARS = {
    80: "####    | 60 s left: b, round 1 of 30",
    40: "##  | 60 s left: b, round 1 of 30",
    30: "#5 | 60 s left: b, round 1",
}


@pytest.mark.parametrize(("columns", "last"), BARS.items())
def test_a_terminal_has_a_bar(columns: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    progress = Progress(stream, Clock())
    progress.plan("a", 4, guess=1.0)
    progress.plan("b", 30, guess=1.0)
    take(progress, "a", seconds=15.0, steps=4)
    progress.plan("b", 30, guess=2.0 / 15.0)
    progress.start("b", "b, round 1 of 30")
    drawn = stream.getvalue().split("\r")
    assert drawn[-1].rstrip() == f"|{last}"
    assert max(map(len, drawn)) <= columns - 3, "a terminal may show ^C behind it"
    progress.say("stays")
    blank = " " * (columns - 1)
    assert stream.getvalue().endswith(f"\r{blank}\rstays\n"), "the bar is gone"


def test_without_a_plan_there_is_text_and_elsewhere_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    progress = Progress(terminal, Clock())
    progress.show("x" * 200)
    progress.show("short")
    *_, last = terminal.getvalue().split("\r")
    assert last == "short".ljust(37)
    assert "x" * 38 not in terminal.getvalue()

    file = io.StringIO()
    progress = Progress(file, Clock())
    progress.plan("a", 4, 1.0)
    take(progress, "a", seconds=SECONDS_BETWEEN_LINES / 2, steps=4)
    progress.clear()
    assert SECONDS_BETWEEN_LINES <= 5, "a few seconds"
    assert file.getvalue() == "4 s left: a\n5 s left: a\n"

    file = io.StringIO()
    clock = Clock()
    progress = Progress(file, clock)
    progress.show_later()
    progress.show("at once")
    clock.time += SECONDS_BETWEEN_LINES
    progress.show("after seconds")
    assert file.getvalue() == "after seconds\n"

    texts = {9.6: "10 s", 59.7: "60 s", 125: "2 min", 5940: "99 min", 40000: "11 h"}
    for seconds, text in texts.items():
        assert duration(seconds) == text


CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried"
)
NONE = "out of memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), NONE),
        (MemoryError(), NONE),
        (RuntimeError(CPU_ALLOCATOR), NONE),
        (RuntimeError("CUDA error: out of memory"), NONE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), NONE),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (Error("a.JPEG cannot be read"), "a.JPEG cannot be read"),
    ],
)
def test_of_any_kind(error: Exception, reason: str) -> None:
    status = "out of memory" if reason is NONE else "failed"
    assert explain(error) == (status, reason)


def test_what_pytorch_raises() -> None:
    with pytest.raises(RuntimeError) as wrong:
        torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError) as large:
        torch.empty(2**60, dtype=torch.int8)
    assert explain(large.value).reason == NONE
    line = wrong.traceback[0].lineno + 1
    place = rf"\(test_around_steps.py, line {line}\)"
    said = rf"RuntimeError: inconsistent tensor size.* {place}"
    assert re.fullmatch(said, explain(wrong.value).reason)


GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_on_cuda_the_device_takes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that steps on CUDA are timed by events, which the device records.

    The host's clock would be wrong, because the host can be far ahead of the device.
    """

    def event(device: torch.device, enable_timing: bool) -> Mock:
        milliseconds = Mock(return_value=2500.0)
        return Mock(elapsed_time=milliseconds)

    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch.accelerator, "current_stream", "stream of {}".format)
    start, end = Mark(GPUS[1]), Mark(GPUS[1])
    assert end.since(start) == 2.5
    assert end.work_since(start) == 2.5
    first: Any = start.event
    assert first.elapsed_time.call_args.args == (end.event,)
    assert first.record.call_args.args == ("stream of cuda:1",)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 3), (5.0, 1), (0.0, 50)])
def test_samples_of_two_seconds_are_averaged(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, taken = 0.0, 0
    ask = Mock(side_effect=lambda device: 0.5 * (device.index + 1))

    def asked() -> bool:
        return ask.call_count > 4 * len(GPUS)

    def step() -> None:
        nonlocal now, taken
        if taken == 0:
            ask.reset_mock()  # earlier calls only check whether the driver answers
        taken += 1
        assert_eventually(asked, lambda: "asked again and again while a step runs")
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("reproduce.run.timed.utilization", ask)
    monkeypatch.setattr("reproduce.run.timed.SAMPLING_SECONDS", 0.001)
    monkeypatch.setattr("reproduce.run.timed.time", clock)
    assert ask_driver(GPUS, step) == [0.5, 1.0]
    assert taken == steps


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([0.5, None], "the driver \\(NVML\\) does not report it for cuda:1"),
        ([0.5, 0.5], "together took less than 60"),  # answers that show that the driver is there
    ],
)
def test_silence_is_told_not_guessed(
    answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproduce.run.timed.utilization", Mock(side_effect=answer))
    monkeypatch.setattr("reproduce.run.timed.MOST_STEPS", 1)
    monkeypatch.setattr("reproduce.run.timed.SAMPLING_SECONDS", 60.0)
    with pytest.raises(Error, match=said):
        ask_driver(GPUS, lambda: None)
