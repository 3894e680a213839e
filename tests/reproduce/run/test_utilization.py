"""Utilization: the driver is asked while steps run, and silence is told, not guessed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import reproduce.run.utilization
from reproduce.error import Error
from reproduce.run.utilization import ask_driver

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_the_mean_of_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.run.utilization, "SAMPLING_SECONDS", 0.001)
    monkeypatch.setattr(reproduce.run.utilization, "LEAST_SECONDS", 0.0)
    shares = {0: 50, 1: 100}
    asked: list[torch.device] = []
    enough = threading.Event()

    def ask(device: torch.device) -> int:
        asked.append(device)
        if len(asked) == len(DEVICES) * 4:
            enough.set()
        return shares[device.index]

    assert ask_driver(DEVICES, lambda: enough.wait(300), ask) == [0.5, 1.0]
    assert enough.is_set(), "asked again and again while a step runs"


def test_a_driver_that_does_not_tell() -> None:
    def ask(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    with pytest.raises(Error, match=r"not available \(pynvml does not seem to be installed\); try 'pip"):
        ask_driver(DEVICES, lambda: None, ask=ask)


def test_steps_too_short_to_be_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.run.utilization, "MOST_STEPS", 1)
    monkeypatch.setattr(reproduce.run.utilization, "SAMPLING_SECONDS", 60.0)
    with pytest.raises(Error, match="took less than 60"):
        ask_driver(DEVICES, lambda: None, ask=lambda device: 1)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 3), (5.0, 1), (0.0, 50)])
def test_steps_are_repeated_for_two_seconds(seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce.run.utilization, "SAMPLING_SECONDS", 0.001)
    first_step, sampled, now, taken = threading.Event(), threading.Event(), [0.0], [0]

    def step() -> None:
        first_step.set()
        assert sampled.wait(300)
        now[0] += seconds
        taken[0] += 1

    def ask(device: torch.device) -> int:
        if first_step.is_set():  # before, it is only asked whether it answers
            sampled.set()
        return 50

    monkeypatch.setattr(reproduce.run.utilization, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert ask_driver(DEVICES[:1], step, ask) == [0.5]
    assert taken == [steps]
