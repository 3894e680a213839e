"""Decide: real differences are seen, noise and trifles are not, and too few samples are called too few."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from reproduce.numbers.metrics import Measurement
from reproduce.numbers.significance import Rule, compare_samples

EIGHT = [1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.005]
POWERS = [2.0**k for k in range(8)]


def times(factor: float, samples: Sequence[float] = EIGHT) -> list[float]:
    return [factor * sample for sample in samples]


@pytest.mark.parametrize(
    ("base", "head", "paired", "outcome"),
    [
        (EIGHT, times(1.2), False, "higher"),
        (EIGHT, times(0.8), False, "lower"),
        (EIGHT * 9, times(1.03, EIGHT * 9), False, "~"),  # significant, and smaller than the threshold
        (POWERS, times(1.2, POWERS), False, "~"),  # large, and not significant
        (POWERS, times(1.2, POWERS), True, "higher"),
        ([5.0] * 8, [5.0] * 8, False, "~"),
        ([5.0] * 8, [5.0] * 8, True, "~"),
        ([5.0] * 8, [6.0] * 8, False, "higher"),
        (2.0, EIGHT, False, "lower"),
        (EIGHT, 2.0, False, "higher"),
        (1, 2, False, "untested"),
        (1.0, times(2)[:7], False, "too few"),
        ([1.0], [9.0], False, "too few"),
    ],
)
def test_outcomes(base: Measurement, head: Measurement, paired: bool, outcome: str) -> None:
    assert compare_samples(base, head, paired=paired).outcome == outcome


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [20, 100_000])  # very many are decided soon, too
def test_a_planted_slowdown_is_seen_where_it_passes_the_threshold(paired: bool, count: int) -> None:
    draw = random.Random(7)
    for slowdown in (1.0, 1.2, 1.5):
        base, head = ([draw.lognormvariate(0, 0.02) for _ in range(count)] for _ in range(2))
        for threshold in (0.0, 0.1, 0.3):
            decision = compare_samples(base, times(slowdown, head), Rule(0.001, threshold), paired=paired)
            assert decision.outcome == ("higher" if slowdown > 1 + threshold else "~")
            assert decision.low is not None and decision.high is not None
            assert decision.low < slowdown < decision.high and decision.high / decision.low < 1.08


@pytest.mark.parametrize("paired", [False, True])
def test_the_interval_is_all_ratios_that_are_not_rejected(paired: bool) -> None:
    draw = random.Random(5)
    base, head = ([draw.lognormvariate(0, 0.1) for _ in range(12)] for _ in range(2))
    decision = compare_samples(base, head, paired=paired)
    assert decision.low is not None and decision.high is not None
    near = ((decision.low * 1.0001, decision.low / 1.0001), (decision.high / 1.0001, decision.high * 1.0001))
    for inside, outside in near:
        p = [compare_samples(times(ratio, base), head, paired=paired).p or 0 for ratio in (inside, outside)]
        assert p[0] > Rule.alpha >= p[1]


@pytest.mark.parametrize(
    ("base", "head", "paired", "message"),
    [
        ([], EIGHT, False, "there is no sample"),
        (EIGHT, [0.0] * 8, False, "only positive numbers have ratios"),
        ([math.nan] * 8, EIGHT, False, "only positive numbers have ratios"),
        (EIGHT, EIGHT[:7], True, "equal numbers, not 8 and 7"),
    ],
)
def test_refuses(base: Measurement, head: Measurement, paired: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_samples(base, head, paired=paired)
