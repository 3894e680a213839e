"""Utilization: the driver is asked while steps run, and silence is told, not guessed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import reproduce.run.timed
from reproduce.error import Error
from reproduce.run.timed import ask_driver

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 3), (5.0, 1), (0.0, 50)])
def test_steps_are_repeated_for_two_seconds_and_samples_averaged(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, now, asked, taken = threading.Event(), [0.0], [0], [0]

    def step() -> None:
        if not taken[0]:
            asked[0] = 0  # before, it is only asked whether it answers
        assert sampled.wait(300), "asked again and again while a step runs"
        now[0] += seconds
        taken[0] += 1

    def ask(device: torch.device) -> int:
        asked[0] += 1
        if asked[0] > 4 * len(DEVICES):
            sampled.set()
        return 50 * (device.index + 1)

    monkeypatch.setattr(torch.cuda, "utilization", ask)
    monkeypatch.setattr(reproduce.run.timed, "SAMPLING_SECONDS", 0.001)
    monkeypatch.setattr(reproduce.run.timed, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert ask_driver(DEVICES, step) == [0.5, 1.0]
    assert taken == [steps]


def test_a_driver_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", ask)
    with pytest.raises(Error, match=r"not available \(pynvml does not seem to be installed\); try 'pip"):
        ask_driver(DEVICES, lambda: None)


def test_steps_too_short_to_be_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1)
    monkeypatch.setattr(reproduce.run.timed, "MOST_STEPS", 1)
    monkeypatch.setattr(reproduce.run.timed, "SAMPLING_SECONDS", 60.0)
    with pytest.raises(Error, match="took less than 60"):
        ask_driver(DEVICES, lambda: None)
