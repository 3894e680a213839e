"""Statistics: medians, quartiles, and ratios taken within rounds."""

from __future__ import annotations

import pytest

from reproduce.numbers.spread import Spread, speed_up, spread, throughput
from reproduce.records.record import Result


def timed(times: list[float], rounds: list[float] | None = None, batch_size: int = 8) -> Result:
    samples = {"step_time": times} if times else {}
    if rounds is not None:
        samples["round"] = rounds
    return Result("e", "r", "measured", config={"batch_size": batch_size}, samples=samples)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([3.0], Spread(3.0)),
        ([1.0, 2.0], Spread(1.5, 1.25, 1.75)),
        ([5.0, 1.0, 3.0, 2.0, 4.0], Spread(3.0, 2.0, 4.0)),
    ],
)
def test_spread(samples: list[float], expected: Spread) -> None:
    assert spread(samples) == expected


def test_throughput_is_of_each_step() -> None:
    assert throughput(timed([1.0, 2.0, 4.0])) == Spread(4.0, 3.0, 6.0)
    assert throughput(timed([])) is None


@pytest.mark.parametrize(
    ("ours", "over", "expected"),
    [
        # The machine slows down fourfold from round to round: the ratio within rounds does not notice.
        (timed([1, 4, 16], [0, 1, 2]), timed([2, 8, 32], [0, 1, 2]), Spread(2, 2, 2)),
        # Only rounds that both have count.
        (timed([9, 1, 1], [0, 1, 2]), timed([3, 3], [1, 2]), Spread(3, 3, 3)),
        (timed([1, 9], [0, 1]), timed([2], [0]), Spread(2)),
        # Equal batch sizes are not taken for granted: it is samples per second that are compared.
        (timed([1], [0], batch_size=16), timed([1], [0], batch_size=8), Spread(2)),
        # A row that was timed alone shares no round: the medians are compared, and there are no quartiles.
        (timed([1, 2, 3]), timed([4, 4], [0, 1]), Spread(2)),
        (timed([1], [0]), timed([3], [1]), Spread(3)),
        (timed([]), timed([1], [0]), None),
        (timed([1], [0]), timed([]), None),
    ],
)
def test_speed_up(ours: Result, over: Result, expected: Spread | None) -> None:
    assert speed_up(ours, over) == expected
