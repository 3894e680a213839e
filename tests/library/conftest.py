"""Provide fixtures for simulated time and simulated GPUs (simulated.py)."""

import pytest

from benchmarks.simulated import Streams
from torchgpipe.balance import profile
from torchgpipe.plan.hardware import timing

from .simulated import CLOCK, Clock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Replace the streams of `cpu:0`, `cpu:1`, … by simulated streams with clocks."""
    return Streams(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make profiles read a clock that advances only when layers run."""
    CLOCK.start()
    for module in (profile, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)
    return CLOCK
