"""Replays in which partitions slow each other down."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sharing import replayed
from torchgpipe.plan.predict import Setup
from torchgpipe.plan.timing import Seconds

ALONE = Seconds(forward=[1.0, 1.0], graph=[1.5, 1.5], backward=[2.0, 2.0])
SHARED = Seconds(forward=[2.0, 2.0], graph=[3.0, 3.0], backward=[4.0, 4.0])


@pytest.mark.parametrize(
    ("balance", "m", "checkpoint", "alone", "shared"),
    [
        ((2,), 2, "except_last", 2 + 3 + 4 + 3 + 4, 2 + 3 + 4 + 3 + 4),  # one partition shares with nobody
        ((1, 1), 1, "always", 2 + 3 + 4, 2 + 3 + 4),  # they never work at once, not even recomputation and backward
        ((1, 1), 2, "never", 3 * 1.5 + 3 * 2, 4 * 1.5 + 4 * 2),  # at once: the second of three, at half the speed
    ],
)
def test_two_partitions_at_work_slow_each_other_down(
    balance: tuple[int, ...], m: int, checkpoint: Any, alone: float, shared: float
) -> None:
    setup = Setup(m, balance, m, checkpoint)
    assert replayed(ALONE, ALONE, setup).seconds == pytest.approx(alone)
    assert replayed(ALONE, SHARED, setup).seconds == pytest.approx(shared)
