"""Test whether two measurements really differ: significantly, and by more than a threshold.

- A difference is real only if a rank test over the samples is significant, and the ratio exceeds a threshold. The test
  alone would pass differences too small to matter, the threshold alone would pass noise.
- The confidence interval of the ratio is the inverted test: all ratios that the test does not reject. So the two agree.
- If there are so few samples that no outcome could be significant, the answer is 'too few', with the number of samples
  that would be enough.

The test cannot know that samples of one run vary less than samples of several runs. For a reliable comparison, run both
sides interleaved and compare paired samples.
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

Outcome = Literal["higher", "lower", "~", "too few", "untested", "disturbed"]
Array = NDArray[numpy.float64]
MOST_SAMPLES = 400  # of each side: the number of pairs grows quadratically


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
    that no real difference was found, which does not prove that there is none. 'untested': both are exact numbers,
    which have a ratio but no spread. 'disturbed': a side is no evidence, whatever its numbers. `needed`, for 'too few':
    the number of samples on each side that would be enough.
    """

    outcome: Outcome
    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None


def compare_samples(
    base: Measurement, head: Measurement, rule: Rule = Rule(), *, paired: bool = False
) -> Decision:
    """Compare `head` with `base`, both positive.

    Samples are independent (Mann-Whitney test), or `paired`: the i-th samples of both ran together (Wilcoxon's
    signed-rank test). Samples against an exact number are tested by signed ranks, too. The ratio is the Hodges-Lehmann
    estimate (1963): the median ratio over all pairs of samples, or over all means of two pairs.
    A number that is not positive, or a side without samples, raises `ValueError`.
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
    """Return the smallest number of samples per side with which any outcome can be significant."""
    count = 1
    while _least_p(count, None if paired else count) > alpha:
        count += 1
    return count


# --- the two tests: candidate log ratios, p-value of a log ratio, numbers of samples of both sides ------------------

Test = tuple[Array, Callable[[float], float], int, int | None]


def _ranks(old: Array, new: Array) -> Test:
    """Prepare Mann-Whitney's test of independent samples."""

    def p(shift: float) -> float:
        return (
            _number(stats.mannwhitneyu(new, old + shift).pvalue)
            if numpy.ptp([*new, *(old + shift)])
            else 1.0
        )

    return numpy.subtract.outer(new, old).ravel(), p, len(old), len(new)


def _signed_ranks(ratios: Array) -> Test:
    """Prepare Wilcoxon's test of log ratios, one for each pair."""

    def p(shift: float) -> float:
        return _number(stats.wilcoxon(ratios - shift).pvalue) if numpy.any(ratios != shift) else 1.0

    first, second = numpy.triu_indices(len(ratios))
    return (ratios[first] + ratios[second]) / 2, p, len(ratios), None


def _decision(
    candidates: Array, p: Callable[[float], float], one: int, other: int | None, rule: Rule
) -> Decision:
    ordered = numpy.sort(candidates)
    middle = float(numpy.median(ordered))
    ratio = math.exp(middle)
    if _least_p(one, other) > rule.alpha:
        return Decision("too few", ratio, needed=needed(rule.alpha, paired=other is None))

    def below(k: int) -> float:
        """Return the p-value of a log ratio between candidates k - 1 and k."""
        return p(ordered[0] - 1 if k == 0 else (ordered[k - 1] + ordered[k]) / 2)

    # p-values rise towards the middle: bisection finds the first candidate that is not rejected.
    rejected = bisect.bisect_right(range((len(ordered) + 1) // 2), rule.alpha, key=below)
    low, high = ordered[max(rejected - 1, 0)], ordered[len(ordered) - max(rejected, 1)]
    chance = p(0.0)
    real = chance <= rule.alpha and abs(middle) > math.log1p(rule.threshold)
    outcome: Outcome = "~" if not real else "higher" if middle > 0 else "lower"
    return Decision(outcome, ratio, min(math.exp(low), ratio), max(math.exp(high), ratio), chance)


def _least_p(one: int, other: int | None) -> float:
    """Return the two-sided p-value of the most extreme outcome: all of one side above all of the other."""
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
    """Keep every k-th of very many samples. That is conservative: with fewer samples, less is significant."""
    return values[:: math.ceil(len(values) / MOST_SAMPLES)]


def _number(p: float) -> float:
    return 1.0 if math.isnan(p) else float(p)
