"""Tests of metrics, such as throughput, and of the significance test for differences of samples.

The significance test must find real differences, and ignore noise and tiny differences.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.numbers import metrics
from reproduce.numbers.accuracy import final_error
from reproduce.numbers.metrics import Measurement, Reading, over, read, speed_up, throughput
from reproduce.numbers.significance import Rule, compare_samples, needed
from reproduce.numbers.sources import Entry
from reproduce.records.record import Record, Result


def timed(times: list[float], rounds: Sequence[float] = (), batch_size: int = 8) -> Result:
    samples = {}
    if times:
        samples["step_time"] = list(times)
    if rounds:
        samples["round"] = list(rounds)
    config = {"batch_size": batch_size}
    return Result("e", "r", "measured", config=config, samples=samples)


def trained(epoch_times: list[float]) -> Result:
    values, samples = {"samples_per_epoch": 900}, {"epoch_time": epoch_times}
    return Result("e", "r", "measured", values=values, samples=samples)


def measurement(reading: Reading | None) -> Measurement | None:
    return None if reading is None else reading.measurement


def test_throughput_is_of_each_step_or_of_the_median_epoch() -> None:
    steps = throughput(timed([1.0, 2.0, 4.0], [0, 1, 2]), "a run")
    rounds = [("a run", 0), ("a run", 1), ("a run", 2)]
    assert steps == Reading([8.0, 4.0, 2.0], "samples/s", rounds)
    assert throughput(timed([])) is None
    assert metrics.epoch_throughput(trained([2.0, 3.0, 9.0])) == 300
    assert metrics.epoch_throughput(timed([1.0])) is None


def over_here(here: list[int | float], theirs: Result | None) -> Reading | None:
    """Return the speed of an emulated result divided by the measured speed of another result.

    Args:
        here: The seconds of each step of the emulated result, if copies between devices take as
            long as on this machine. The emulated speed is computed from these seconds.
        theirs: The measured result.
    """
    emulated = timed([99.0, 99.0], [0, 1])
    samples = {**emulated.samples, "here_time": here}
    return metrics.over_measured(replace(emulated, samples=samples), theirs)


ROUNDS = timed([4, 4], [0, 1])
ONE = timed([1], [0])


@pytest.mark.parametrize(
    ("ratio", "ours", "base", "ratios"),
    [
        # The machine gets four times slower in each round. Ratios within rounds do not change.
        (speed_up, timed([1, 4, 16], [0, 1, 2]), timed([2, 8, 32], [0, 1, 2]), [2, 2, 2]),
        # Only rounds that both rows have count.
        (speed_up, timed([9, 1, 1], [0, 1, 2]), timed([3, 3], [1, 2]), [3, 3]),
        # Batch sizes can differ, because samples per second are compared.
        (speed_up, timed([1], [0], batch_size=16), ONE, [2]),
        # If rows have no common round, the medians are compared, and there are no quartiles.
        (speed_up, timed([1, 2, 3]), ROUNDS, 2),
        (speed_up, timed([]), ONE, None),
        (speed_up, ONE, None, None),
        (over_here, [2, 8], ROUNDS, [2, 0.5]),
        (over_here, [2, 8], None, None),
        (over_here, [], ONE, None),
        # Without rounds, samples are divided in order.
        (over, Reading([2.0, 4.0]), Reading(2.0), [1.0, 2.0]),
        (over, Reading(8.0), Reading([2.0, 4.0]), [4.0, 2.0]),
        (over, Reading(8.0), Reading(2.0), 4.0),
        (over, Reading([2.0, 9.0, 7.0]), Reading([1.0, 3.0]), [2.0, 3.0]),
    ],
)
def test_ratios(ratio: Any, ours: Any, base: Any, ratios: float | list[float] | None) -> None:
    found = ratio(ours, base)
    assert measurement(found) == ratios


@pytest.mark.parametrize(
    ("metric", "values", "unit", "expected", "in_unit"),
    [
        ("utilization", {"utilization": 44}, {"utilization": "%"}, 0.44, "share"),
        ("utilization", {"utilization": [0.4, 0.6]}, {}, 0.5, "share"),
        ("memory", {"peak_allocated": [1, 3]}, {}, 4, "bytes"),
        ("reserved", {"peak_reserved": [1, 3]}, {"memory": "GiB"}, 4, "bytes"),
        ("reserved", {"memory": 2.0}, {"memory": "GiB"}, 2**31, "bytes"),
        (
            "reserved",
            {"model_memory": 1.0, "peak_activation_memory": 2.0},
            {"model_memory": "GB", "peak_activation_memory": "GB"},
            3e9,
            "bytes",
        ),
        ("reserved", {"memory": None}, {"memory": "GiB"}, None, ""),
        ("throughput", {"throughput": 26.7}, {}, 26.7, "samples/s"),
        ("time", {"step_time": 0.5}, {}, 0.5, "s"),
        ("time", {"time": 0.5}, {}, 0.5, "s"),
        ("parameters", {"parameters": 7}, {"parameters": "count"}, 7, "count"),
        ("parameters", {"parameters": "many"}, {}, None, ""),
    ],
)
def test_values(
    metric: str,
    values: dict[str, object],
    unit: dict[str, str],
    expected: float | None,
    in_unit: str,
) -> None:
    result = Result("e", "r", "published", values=values)
    record = Record("r", "T", "published", unit, [result])

    reading = read(Entry(record, result), metric)

    assert measurement(reading) == expected
    if reading is not None:
        assert reading.unit == in_unit


def test_errors_are_those_after_the_last_epoch_of_each_seed_that_has_ended() -> None:
    """Check how the metric `top1_error` (the percentage of wrong classes) is read from a result.

    A row (configuration) is trained with several random seeds. For each training that has ended,
    the metric has one value: the error after the last epoch. A published row has only a mean and a
    deviation.
    """
    samples = {"epoch": [1.0, 2.0, 1.0, 2.0, 1.0], "top1_error": [50.0, 10.0, 60.0, 17.0, 5.0]}
    result = Result("e", "r", "measured", config={"epochs": 2}, samples=samples)
    record = Record("r", "T", "measured", {}, [result])

    reading = read(Entry(record, result), "top1_error")

    assert reading == Reading([10, 17], "%", mean=True)
    assert reading.middle == 13.5
    assert reading.quartiles == (11.75, 15.25)
    unfinished = replace(result, samples={"epoch": [1.0], "top1_error": [5.0]})
    assert final_error(unfinished) is None
    printed = Result("e", "r", "published", values={"top1_error": 22.0, "top1_error_spread": 0.1})
    assert final_error(printed) == (22.0, 0.1)
    empty = replace(printed, values={})
    assert final_error(empty) is None


EIGHT = [1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.005]
POWERS = [2.0**k for k in range(8)]


def times(factor: float, samples: Sequence[float] = EIGHT) -> list[float]:
    return [factor * sample for sample in samples]


@pytest.mark.parametrize(
    ("base", "head", "paired", "outcome"),
    [
        (EIGHT, times(1.2), False, "higher"),
        (EIGHT, times(0.8), False, "lower"),
        # The difference is significant, but too small to matter.
        (EIGHT * 9, times(1.03, EIGHT * 9), False, "~"),
        # The difference is large, but not significant.
        (POWERS, times(1.2, POWERS), False, "~"),
        (POWERS, times(1.2, POWERS), True, "higher"),
        ([5.0] * 8, [5.0] * 8, False, "~"),
        ([5.0] * 8, [5.0] * 8, True, "~"),
        (2.0, EIGHT, False, "lower"),
        (EIGHT, 2.0, False, "higher"),
        (1, 2, False, "untested"),
        (1.0, times(2)[:7], False, "too few"),
        ([], EIGHT, False, "there is no sample"),
        (EIGHT, [0.0] * 8, False, "only positive numbers have ratios"),
        ([math.nan] * 8, EIGHT, False, "only positive numbers have ratios"),
        (EIGHT, EIGHT[:7], True, "equal numbers on both sides, but got 8 and 7"),
    ],
)
def test_outcomes(base: Measurement, head: Measurement, paired: bool, outcome: str) -> None:
    """Check that `compare_samples` returns the expected outcome or raises the expected error.

    A sample is a measured number, such as the time of a step. The first argument has the samples of
    the old version, and the second argument those of the new version.
    """
    try:
        decision = compare_samples(base, head, paired=paired)
    except ValueError as error:
        assert len(outcome) > 10, "it is a message"
        assert outcome in str(error)
    else:
        assert decision.outcome == outcome


@pytest.mark.parametrize("second", [1.0, 1.005])
def test_equal_samples_have_an_exact_p(second: float) -> None:
    """Check the exact p-value of a comparison of five samples with five larger samples.

    There are 252 ways to divide ten samples into two groups of five. Only two of these ways are as
    extreme as the groups in this test, so the p-value is 2/252.
    """
    base = [1.0, second, 1.01, 1.02, 1.03]

    decision = compare_samples(base, [2.0, 2.01, 2.02, 2.03, 2.04])

    assert decision.outcome == "higher"
    assert decision.p == pytest.approx(2 / 252)
    assert decision.low == pytest.approx(2.0 / 1.03)
    assert decision.high == pytest.approx(2.04)


def test_samples_that_both_sides_have_are_counted_exactly() -> None:
    """Check the p-value of two sides of six samples, some of which are equal.

    Of the 924 ways to divide the twelve samples between the sides, 12 are as extreme as this one.
    A test that takes the samples as different finds only 8, and calls the difference significant.
    """
    decision = compare_samples([2, 2, 2, 2, 3, 3], [3, 3, 4, 5, 5, 5])

    assert decision.p == pytest.approx(12 / 924)
    assert decision.outcome == "~"


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [5, 8, 9, 10, 14, 15, 30])
def test_the_clearest_difference_is_significant_or_too_few_samples_are(
    count: int, paired: bool
) -> None:
    """Check that a side that is ten times as large never counts as equal, at a tiny alpha."""
    base = [1 + 0.01 * k for k in range(count)]
    decision = compare_samples(base, times(10, base), Rule(alpha=1e-4), paired=paired)
    enough = needed(1e-4, paired=paired)
    assert decision.outcome == ("higher" if count >= enough else "too few")


@pytest.mark.parametrize(("few", "outcome"), [(1, "too few"), (2, "higher"), (3, "higher")])
def test_few_samples_beside_many(few: int, outcome: str) -> None:
    many = [1 + 0.001 * k for k in range(60)]
    assert compare_samples(many, times(10, many[:few])).outcome == outcome


@pytest.mark.parametrize("paired", [False, True])
def test_the_interval_is_all_ratios_that_are_not_rejected(paired: bool) -> None:
    draw = random.Random(5)
    base = [draw.lognormvariate(0, 0.1) for _ in range(12)]
    head = [draw.lognormvariate(0, 0.1) for _ in range(12)]

    def p_of(ratio: float) -> float:
        """Return the p-value of the hypothesis that `head` is `ratio` times as large as `base`."""
        decision = compare_samples(times(ratio, base), head, paired=paired)
        return decision.p or 0

    decision = compare_samples(base, head, paired=paired)
    low, high = decision.low, decision.high
    assert low is not None
    assert high is not None
    for inside, outside in ((low * 1.0001, low / 1.0001), (high / 1.0001, high * 1.0001)):
        assert p_of(inside) > Rule.alpha
        assert p_of(outside) <= Rule.alpha
