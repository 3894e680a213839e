"""Work out medians, quartiles and ratios of samples, which records hold as they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from reproduce.records.record import Result

__all__ = ["Spread", "speed_up", "spread", "throughput"]


class Spread(NamedTuple):
    """Hold the median and the quartiles of some samples; a single sample has no quartiles."""

    median: float
    low: float | None = None
    high: float | None = None


def spread(samples: Sequence[float]) -> Spread:
    """Return the median of at least one sample, and the quartiles of more."""
    if len(samples) == 1:
        return Spread(samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


def throughput(result: Result) -> Spread | None:
    """Return samples per second, step by step; None where no step was timed."""
    times = result.samples.get("step_time")
    return spread([result.config["batch_size"] / seconds for seconds in times]) if times else None


def speed_up(result: Result, over: Result) -> Spread | None:
    """Return how many times faster `result` is than `over`, in throughput.

    Steps of one round ran next to each other, so the ratio is taken within rounds. Where the two share no
    round, it is the ratio of their medians, which has no quartiles. None where one of them was not timed.
    """
    ours, theirs = _per_sample(result), _per_sample(over)
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        return spread([theirs[round] / ours[round] for round in shared])
    mine, other = throughput(result), throughput(over)
    return None if mine is None or other is None else Spread(mine.median / other.median)


def _per_sample(result: Result) -> dict[float, float]:
    """Return the seconds per sample of each round."""
    pairs = zip(result.samples.get("round", []), result.samples.get("step_time", []), strict=False)
    return {round: seconds / result.config["batch_size"] for round, seconds in pairs}
