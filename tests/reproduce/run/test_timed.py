"""Timed steps: GPU utilization comes from the driver. Timelines are tested in test_emulation.py and cli/test_run.py."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.error import Error
from reproduce.run.timed import ask_driver
from torchgpipe.timeline.stopwatch import Mark

from ...library.ledger import assert_eventually

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_on_cuda_the_device_takes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be far ahead of the device."""
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Mock(elapsed_time=Mock(return_value=2500.0)))
    monkeypatch.setattr(torch.cuda, "current_stream", "stream of {}".format)
    start, end = (Mark(GPUS[1]) for _ in range(2))
    assert end.since(start) == end.work_since(start) == 2.5
    first: Any = start.event
    assert first.elapsed_time.call_args.args == (end.event,) and first.record.call_args.args == ("stream of cuda:1",)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 3), (5.0, 1), (0.0, 50)])
def test_samples_of_two_seconds_are_averaged(seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], [0]
    ask = Mock(side_effect=lambda device: 50 * (device.index + 1))

    def step() -> None:
        if not taken[0]:
            ask.reset_mock()  # calls before only check that the driver answers
        taken[0] += 1
        assert_eventually(lambda: ask.call_count > 4 * len(GPUS), lambda: "asked again and again while a step runs")
        now[0] += seconds

    monkeypatch.setattr(torch.cuda, "utilization", ask)
    monkeypatch.setattr("reproduce.run.timed.SAMPLING_SECONDS", 0.001)
    monkeypatch.setattr("reproduce.run.timed.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert ask_driver(GPUS, step) == [0.5, 1.0]
    assert taken == [steps]


@pytest.mark.parametrize(
    ("answer", "said"),  # the first call only checks that the driver answers
    [(ModuleNotFoundError("no\npynvml"), r" \(no pynvml\); try 'pip install"), ([1, 1], "the steps took less than 60")],
)
def test_silence_is_told_not_guessed(answer: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", Mock(side_effect=answer))
    monkeypatch.setattr("reproduce.run.timed.MOST_STEPS", 1)
    monkeypatch.setattr("reproduce.run.timed.SAMPLING_SECONDS", 60.0)
    with pytest.raises(Error, match=said):
        ask_driver(GPUS, lambda: None)
