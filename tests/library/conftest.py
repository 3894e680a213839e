"""Define fixtures that replace clocks and streams by simulated ones (simulated.py)."""

import pytest

from benchmarks.simulated import Streams
from torchgpipe.balance import profile
from torchgpipe.plan.hardware import timing

from .simulated import CLOCK, Clock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Simulate the streams of `cpu:0`, `cpu:1`, …."""
    return Streams(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make profiling read a simulated clock, which advances only when layers run."""
    CLOCK.start()
    for module in (profile, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)
    return CLOCK
