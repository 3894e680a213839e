"""What stands in for time and for GPUs (simulated.py)."""

import pytest

from torchgpipe.balance import profile
from torchgpipe.plan.hardware import timing

from .simulated import CLOCK, Clock, Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let `cpu:0`, `cpu:1`, … have streams, and these a clock."""
    return Streams(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let profiles be timed by a clock that only layers advance."""
    CLOCK.start()
    for module in (profile, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)
    return CLOCK
