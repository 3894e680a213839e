"""Fixtures for simulated time and GPUs (simulated.py)."""

import pytest

from benchmarks.simulated import Streams
from torchgpipe.balance import profile
from torchgpipe.plan.hardware import timing

from .simulated import CLOCK, Clock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Give `cpu:0`, `cpu:1`, … simulated streams with clocks."""
    return Streams(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make profiles use a clock that only layers advance."""
    CLOCK.start()
    for module in (profile, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)
    return CLOCK
