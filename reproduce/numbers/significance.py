"""Test whether two measurements differ for real: significantly, and by more than a threshold. No I/O in here.

- A difference is real only if a rank test over the samples calls it significant, and it is larger than a threshold:
  the first alone is passed by differences that nobody cares for, the second alone by noise.
- The ratio's interval is the test inverted: all ratios that the test does not reject. So the two never contradict.
- Where there are so few samples that no outcome whatever could be significant, that is the answer, with the number
  of samples that would do.

What it cannot know: samples of one run vary less than runs do. Runs that are to be compared in earnest are interleaved,
and then their samples come in pairs.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy
from numpy.typing import NDArray
from scipy import stats

from reproduce.numbers.metrics import Measurement

Outcome = Literal["higher", "lower", "~", "too few", "untested"]
Array = NDArray[numpy.float64]
MOST_SAMPLES = 400  # of each side, as all pairs of them are looked at


@dataclass(frozen=True)
class Rule:
    """Say what counts as a difference.

    `alpha` is the risk of calling a difference significant where there is none; `threshold` the least relative
    difference that matters, 0.05 being 5 %.
    """

    alpha: float = 0.01
    threshold: float = 0.05


@dataclass(frozen=True)
class Decision:
    """Hold how `head` compares with `base`.

    `ratio` estimates head / base, and lies between `low` and `high` with a confidence of 1 - alpha. '~' means
    that no real difference was found, which is not to say that there is none. 'untested' means that both are exact
    numbers, which have a ratio but no spread. `needed` says how many samples, of each side that has any, would do.
    """

    outcome: Outcome
    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None


def compare_samples(base: Measurement, head: Measurement, rule: Rule = Rule(), *, paired: bool = False) -> Decision:
    """Compare `head` with `base`, both positive.

    Samples of the two are independent (Mann-Whitney), or `paired`: the i-th of both ran next to each other (Wilcoxon's
    signed ranks). Samples against an exact number are tested by signed ranks, too. The ratio is the median of the
    ratios of all pairs, or of all means of two pairs (Hodges and Lehmann, 1963).

    Raises:
        ValueError: a number is not positive, a side has no sample, or paired sides differ in length.
    """
    exact = [isinstance(side, (int, float)) for side in (base, head)]
    old, new = _logs(base), _logs(head)
    if all(exact):
        return Decision("untested", math.exp(new[0] - old[0]))
    if paired or any(exact):
        if paired and len(old) != len(new):
            raise ValueError(f"paired samples come in equal numbers, not {len(old)} and {len(new)}")
        return _decision(*_signed_ranks(_thin(new - old)), rule)
    return _decision(*_ranks(_thin(old), _thin(new)), rule)


def needed(alpha: float, *, paired: bool) -> int:
    """Return the least number of samples, of each side, with which anything can be significant at all."""
    count = 1
    while _least_p(count, None if paired else count) > alpha:
        count += 1
    return count


# --- the two tests: candidates of the log ratio, p of any log ratio, samples of the sides ---------------------------

Test = tuple[Array, Callable[[float], float], int, int | None]


def _ranks(old: Array, new: Array) -> Test:
    """Prepare Mann-Whitney's test of independent samples."""

    def p(shift: float) -> float:
        return _number(stats.mannwhitneyu(new, old + shift).pvalue) if numpy.ptp([*new, *(old + shift)]) else 1.0

    return numpy.subtract.outer(new, old).ravel(), p, len(old), len(new)


def _signed_ranks(ratios: Array) -> Test:
    """Prepare Wilcoxon's test of log ratios, one for each pair."""

    def p(shift: float) -> float:
        return _number(stats.wilcoxon(ratios - shift).pvalue) if numpy.any(ratios != shift) else 1.0

    first, second = numpy.triu_indices(len(ratios))
    return (ratios[first] + ratios[second]) / 2, p, len(ratios), None


def _decision(candidates: Array, p: Callable[[float], float], one: int, other: int | None, rule: Rule) -> Decision:
    ordered = numpy.sort(candidates)
    middle = float(numpy.median(ordered))
    ratio = math.exp(middle)
    if _least_p(one, other) > rule.alpha:
        return Decision("too few", ratio, needed=needed(rule.alpha, paired=other is None))

    def below(k: int) -> float:
        """Return p of a ratio between the k-th candidate and the one before."""
        return p(ordered[0] - 1 if k == 0 else (ordered[k - 1] + ordered[k]) / 2)

    # p rises towards the middle, so the first candidate that is not rejected is found by bisection.
    rejected = bisect.bisect_right(range((len(ordered) + 1) // 2), rule.alpha, key=below)
    low, high = ordered[max(rejected - 1, 0)], ordered[len(ordered) - max(rejected, 1)]
    chance = p(0.0)
    real = chance <= rule.alpha and abs(middle) > math.log1p(rule.threshold)
    outcome: Outcome = "~" if not real else "higher" if middle > 0 else "lower"
    return Decision(outcome, ratio, min(math.exp(low), ratio), max(math.exp(high), ratio), chance)


def _least_p(one: int, other: int | None) -> float:
    """Return the p of the most extreme outcome there is: all of one side above all of the other, two-sided."""
    return 2.0 ** (1 - one) if other is None else 2 / math.comb(one + other, one)


def _logs(side: Measurement) -> Array:
    values = numpy.atleast_1d(numpy.asarray(side, dtype=float))
    if not len(values):
        raise ValueError("there is no sample to compare")
    if not (numpy.isfinite(values).all() and (values > 0).all()):
        raise ValueError("only positive numbers have ratios")
    logs: Array = numpy.log(values)
    return logs


def _thin(values: Array) -> Array:
    """Take every k-th of very many, which errs on the side of caution: fewer prove less."""
    return values[:: math.ceil(len(values) / MOST_SAMPLES)]


def _number(p: float) -> float:
    return 1.0 if math.isnan(p) else float(p)
