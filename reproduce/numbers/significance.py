"""Test whether two measurements really differ: significantly, and by more than a threshold.

- A difference counts as real if two conditions are met: a rank test over the samples is
  significant, and the relative difference exceeds a threshold. The test alone would accept
  differences that are too small to matter. The threshold alone would accept noise.
- The confidence interval of the ratio contains all ratios that the test does not reject. So the
  interval and the test agree.
- If there are so few samples that no outcome could be significant, the answer is "too few", with
  the number of samples that would be enough.

Samples of one run vary less than samples of several runs. So the test can find a difference between
two runs of the same code. For a reliable comparison, measure both sides (the compared versions)
alternately, and compare paired samples.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu, permutation_test, rankdata, wilcoxon

from reproduce.numbers.metrics import Measurement

Outcome = Literal["higher", "lower", "~", "too few", "untested", "disturbed", "base differs"]
Array = NDArray[numpy.float64]
# A test uses at most this number of samples of a side: the number of pairs grows quadratically.
MOST_SAMPLES = 400
# More ways to divide ranks between two sides would take too long. Two sides of 8 have 12 870.
MOST_DIVISIONS = 15_000
# If both sides have more samples, p-values are approximated by a normal distribution. For fewer
# samples, the approximation would be too high for clear differences, so that no difference could be
# significant at a small alpha.
MOST_EXACT = 50
# The confidence interval of a ratio is too wide for a verdict if its ends differ by this factor.
# For example, an interval from 0.5 to 2 could hide that a side has become half as fast.
TOO_WIDE = 4.0


@dataclass(frozen=True)
class Rule:
    """The rule that decides what counts as a difference.

    Attributes:
        alpha: The accepted risk of calling a difference significant if there is none.
        threshold: The smallest relative difference that matters. 0.05 means 5 %.
    """

    alpha: float = 0.01
    threshold: float = 0.05


@dataclass(frozen=True)
class Decision:
    """The result of comparing a measurement, `head`, with another one, `base`.

    Attributes:
        outcome: What was found:
            - "higher" or "lower": a real difference
            - "~": no real difference, which does not prove that there is none
            - "too few": so few samples that no outcome could be significant
            - "untested": nothing, because both numbers are exact and have no spread
            - "disturbed": nothing, because other programs used the machine during a measurement
            - "base differs": nothing, because the rows' baseline itself has changed
        ratio: The estimate of head / base.
        low: The lower end of the confidence interval of the ratio.
        high: The upper end of this interval.
        p: The p-value of the test.
        needed: With "too few", the number of samples on each side that would be enough.
    """

    outcome: Outcome
    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None

    @property
    def is_too_noisy(self) -> bool:
        """Whether no difference was found, but noise could hide a large one (see `TOO_WIDE`)."""
        if self.outcome != "~" or self.low is None or self.high is None:
            return False
        return self.high >= TOO_WIDE * self.low


def compare_samples(
    base: Measurement, head: Measurement, rule: Rule = Rule(), *, paired: bool = False
) -> Decision:
    """Compare the measurement `head` with the measurement `base`: find out whether they differ.

    Both are called sides here. All numbers must be positive.

    - Independent samples are compared by the Mann-Whitney test. The ratio of the sides is the
      median of the ratios of every sample of `head` to every sample of `base`.
    - If `paired` is true, the i-th samples of both sides were measured together. Each such pair has
      a ratio. These ratios are compared with 1 by Wilcoxon's signed-rank test. The ratio of the
      sides is the median over the geometric means of every two ratios.
    - If one side is an exact number, each sample of the other side forms a pair with this number.

    Both estimates of the ratio are by Hodges and Lehmann (1963).

    Raises:
        ValueError: A number is not positive, a side has no sample, or the sides of a paired
            comparison have different numbers of samples.
    """
    base_is_exact = isinstance(base, (int, float))
    head_is_exact = isinstance(head, (int, float))
    old = _logs(base)
    new = _logs(head)
    if base_is_exact and head_is_exact:
        return Decision("untested", math.exp(new[0] - old[0]))
    if paired and len(old) != len(new):
        raise ValueError(
            "paired samples must come in equal numbers on both sides, but got "
            f"{len(old)} and {len(new)}"
        )
    if paired or base_is_exact or head_is_exact:
        return _decision(_signed_ranks(_thin(new - old)), rule)
    return _decision(_ranks(_thin(old), _thin(new)), rule)


def by_threshold(decision: Decision, threshold: float) -> Decision:
    """Decide without a test whether two numbers without samples differ by more than a threshold."""
    change = math.log(decision.ratio)
    outcome: Outcome = "~"
    rounding = 1e-9  # a change by exactly the threshold does not exceed it
    if abs(change) > math.log1p(threshold) + rounding:
        outcome = "higher" if change > 0 else "lower"
    return replace(decision, outcome=outcome)


def needed(alpha: float, *, paired: bool) -> int:
    """Return the smallest number of samples per side with which an outcome can be significant.

    A side is one of the two compared measurements. If `paired` is true, each sample of one side was
    measured together with a sample of the other side.
    """
    count = 1
    while _least_p(count, None if paired else count) > alpha:
        count += 1
    return count


# --- the two tests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTest:
    """A rank test for the logarithm of the ratio of two measurements (the log ratio).

    The two measurements are called sides. Either their samples are independent, or they are pairs.

    Attributes:
        candidates: The values whose median is the estimate of the log ratio. In a test of pairs,
            these are the mean log ratios of every two pairs. In a test of independent samples,
            these are the log ratios of each sample of one side to each sample of the other side.
        p: A function that returns the p-value of the hypothesis that the log ratio has a given
            value.
        samples: The number of samples on one side or, in a test of pairs, the number of pairs.
        others: The number of samples on the other side. It is None in a test of pairs.
    """

    candidates: Array
    p: Callable[[float], float]
    samples: int
    others: int | None = None


def _ranks(old: Array, new: Array) -> RankTest:
    """Prepare Mann-Whitney's test for independent samples."""

    def p(shift: float) -> float:
        shifted = old + shift
        if not numpy.ptp([*new, *shifted]):
            return 1.0
        ranks = rankdata([*new, *shifted])
        divisions = math.comb(len(ranks), len(new))
        if len(set(ranks)) < len(ranks) and divisions <= MOST_DIVISIONS:
            return _exact(ranks[: len(new)], ranks[len(new) :])
        # If some samples are equal, the exact method can give too high a p-value.
        method = "exact" if min(len(old), len(new)) <= MOST_EXACT else "asymptotic"
        return _number(mannwhitneyu(new, shifted, method=method).pvalue)

    differences = numpy.subtract.outer(new, old)
    return RankTest(differences.ravel(), p, len(old), len(new))


def _exact(new: Array, old: Array) -> float:
    """Return the exact p-value of Mann-Whitney's test, from the ranks of both sides' samples.

    This function is for few samples, some of which are equal. `mannwhitneyu` takes all samples as
    different, so its p-value can be a little too low or too high. Here, the p-value is computed
    from all possible divisions of the ranks between the two sides.
    """

    def rank_sum(one: Array, other: Array, axis: int) -> Array:
        total: Array = one.sum(axis=axis)
        return total

    found = permutation_test((new, old), rank_sum, vectorized=True, n_resamples=math.inf)
    return float(found.pvalue)


def _signed_ranks(ratios: Array) -> RankTest:
    """Prepare Wilcoxon's signed-rank test for pairs of samples.

    For each pair, `ratios` has the logarithm of the ratio of its two samples.
    """

    def p(shift: float) -> float:
        differences = ratios - shift
        differences = differences[differences != 0]  # as Wilcoxon advises
        if not len(differences):
            return 1.0
        method = "exact" if len(differences) <= MOST_EXACT else "approx"
        return _number(wilcoxon(differences, method=method).pvalue)

    first, second = numpy.triu_indices(len(ratios))
    means = (ratios[first] + ratios[second]) / 2
    return RankTest(means, p, len(ratios))


def _decision(test: RankTest, rule: Rule) -> Decision:
    ordered = numpy.sort(test.candidates)
    count = len(ordered)
    middle = float(numpy.median(ordered))
    ratio = math.exp(middle)
    if _least_p(test.samples, test.others) > rule.alpha:
        enough = needed(rule.alpha, paired=test.others is None)
        return Decision("too few", ratio, needed=enough)

    def below(k: int) -> float:
        """Return the p-value of the log ratio midway between the sorted candidates k - 1 and k."""
        if k == 0:
            return test.p(ordered[0] - 1)
        return test.p((ordered[k - 1] + ordered[k]) / 2)

    # p-values rise towards the middle, so bisection finds the first candidate that is not rejected.
    lower_half = range((count + 1) // 2)
    rejected = bisect.bisect_right(lower_half, rule.alpha, key=below)
    low = math.exp(ordered[max(rejected - 1, 0)])
    high = math.exp(ordered[count - max(rejected, 1)])
    chance = test.p(0.0)
    outcome: Outcome = "~"
    if chance <= rule.alpha and abs(middle) > math.log1p(rule.threshold):
        outcome = "higher" if middle > 0 else "lower"
    return Decision(outcome, ratio, min(low, ratio), max(high, ratio), chance)


def _least_p(one: int, other: int | None) -> float:
    """Return the smallest two-sided p-value that a rank test can give with these sample sizes.

    In a test of pairs, the test gives this p-value if all differences have the same sign. In a test
    of independent samples, it does if all samples of one side are above all of the other side.

    Args:
        one: The number of samples of one side or, in a test of pairs, the number of pairs.
        other: The number of samples of the other side. It is None in a test of pairs.
    """
    if other is None:
        return 2.0 ** (1 - one)
    return 2 / math.comb(one + other, one)


def _logs(side: Measurement) -> Array:
    values = numpy.atleast_1d(numpy.asarray(side, dtype=float))
    if not len(values):
        raise ValueError("there is no sample to compare")
    if not numpy.isfinite(values).all() or not (values > 0).all():
        raise ValueError("only positive numbers have ratios")
    logs: Array = numpy.log(values)
    return logs


def _thin(values: Array) -> Array:
    """Return the samples or, if there are more than `MOST_SAMPLES`, only every k-th sample.

    With fewer samples, fewer differences are significant. So leaving out samples creates no false
    differences.
    """
    step = math.ceil(len(values) / MOST_SAMPLES)
    return values[::step]


def _number(p: float) -> float:
    return 1.0 if math.isnan(p) else float(p)
