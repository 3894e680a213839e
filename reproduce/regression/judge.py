"""Decide whether the new code (head) is slower than the old code (base, and perhaps one more).

Each case (a training step) is timed with all versions, in processes that are restarted many times:

1. Each restart gives one number for a case: the median of head / base over its pairs of samples.
   The samples themselves are not independent: a process can be faster for its whole life.
2. A rank test decides whether these numbers show that head is slower or faster.
3. The geometric mean of these numbers over all cases is tested in the same way. The mean is less
   noisy than a single case, and shows a change that slows all cases down.

Cases are in two groups, called families: cases that are timed by CPU time, and cases that are timed
by wall clock, which show whether devices work at the same time. Each family has its own mean.

Alpha is the accepted risk of a false alarm in all tests together. Each test gets an equal part of
this risk: alpha divided by the number of tests (Bonferroni correction).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from scipy import stats

from reproduce.error import Error, Worse
from reproduce.numbers.compare import verdict
from reproduce.numbers.metrics import median_ratio
from reproduce.numbers.significance import Decision, Rule, compare_samples, needed
from reproduce.regression.gates import Found
from reproduce.regression.job import Samples
from reproduce.regression.timed import Clock
from reproduce.tables.layout import many

METRIC, TOGETHER, WALL_TOGETHER = "time", "all together", "all by wall clock"
Old = Literal["base", "also"]
"""The old versions with which head is compared."""
OLDS: tuple[Old, ...] = ("base", "also")

ALSO = 0.1
"""The threshold of the comparison with the second old version.

Between the two lie many changes, each of which may have been slower by less than the threshold of
`base`. So this threshold is the sum of what is accepted.
"""
WALL = 2.5
"""By how much the thresholds are multiplied for cases by wall clock, which have more noise."""
BUSY = 0.25
"""The share of restarts during which other programs may use the cores.

If there are more, a case by wall clock is disturbed: tasks cannot overlap on a core that is taken,
so that nothing shows a lost overlap.
"""


@dataclass(frozen=True)
class Limits:
    """What counts as slower.

    Attributes:
        alpha: The accepted risk of a false alarm in all tests together.
        threshold: The smallest relative difference to the old version `base` that matters. This is
            for cases that are timed by CPU time. By wall clock, the threshold is higher.
        also: The threshold in comparison with the second old version.
    """

    alpha: float = 0.01
    threshold: float = 0.02
    also: float = ALSO

    def of(self, old: Old, together: str) -> float:
        """Return the threshold for the cases of one clock, compared with the old version `old`."""
        own = self.threshold if old == "base" else self.also
        return own * WALL if together == WALL_TOGETHER else own


@dataclass(frozen=True)
class Judgement:
    """The samples of every case, and what the statistical tests decide from them.

    Attributes:
        samples: The samples of each case, by the name of the case.
        decisions: For each old version, the decision about each case that both versions ran, by the
            name of the case. If several cases are timed by CPU time, the key `TOGETHER` has the
            decision about their mean. If several cases are timed by wall clock, the key
            `WALL_TOGETHER` has the decision about their mean.
        alpha: The accepted risk of a false alarm in a single test.
        gates: The findings of the gates, which are checks that measure no time.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[Old, Mapping[str, Decision]]
    alpha: float
    gates: Sequence[Found] = field(default_factory=list)

    @property
    def worse(self) -> list[str]:
        """Return the names of the gates, cases and means that are worse than in `base`."""
        gates = [gate.name for gate in self.gates if gate.verdict == "worse"]
        return gates + self.called("worse", "base")

    def called(self, wanted: str, old: Old) -> list[str]:
        """Return the cases and means that have this verdict in comparison with `old`."""
        names = []
        for name, decision in self.decisions[old].items():
            if verdict(decision, METRIC) == wanted:
                names.append(name)
        return names


def judge(found: Mapping[str, Samples], limits: Limits, gates: Sequence[Found] = ()) -> Judgement:
    """Decide for each case whether the new code (head) is slower than the old code.

    The same is decided for the mean over all cases that use the same clock (a family).

    Args:
        found: The samples of each case, by the name of the case.
        limits: What counts as slower.
        gates: The findings of the gates, which are checks that measure no time.
    """
    ratios: dict[tuple[Old, str], dict[str, list[float]]] = {}
    clocks = {case: samples.clock for case, samples in found.items()}
    tests = 0
    for old in OLDS:
        for together, cases in families(clocks).items():
            own = {case: _ratios(found[case], old) for case in cases}
            own = {case: numbers for case, numbers in own.items() if numbers}
            if len(own) > 1:
                means = stats.gmean(list(own.values()), axis=0)
                own[together] = means.tolist()
            ratios[old, together] = own
            tests += len(own)
    alpha = limits.alpha / max(1, tests)
    decisions: dict[Old, dict[str, Decision]] = {"base": {}, "also": {}}
    for (old, together), own in ratios.items():
        rule = Rule(alpha, limits.of(old, together))
        disturbed = together == WALL_TOGETHER and any(
            _busy(found[case]) for case in own if case in found
        )
        for name, numbers in own.items():
            ones = [1.0] * len(numbers)
            decision = compare_samples(ones, numbers, rule, paired=True)
            # All versions are slowed down alike, so a case that is slower is so, busy or not.
            if disturbed and decision.outcome != "higher":
                decision = replace(decision, outcome="disturbed")
            decisions[old][name] = decision
    return Judgement(found, decisions, alpha, gates)


def _ratios(samples: Samples, old: Old) -> list[float]:
    """Return a ratio for each restart: the median of head / old over its pairs of samples."""
    before = samples.base if old == "base" else samples.also
    if not before or not samples.head:
        return []
    ratios = []
    for theirs, ours in zip(before, samples.head, strict=True):
        ratios.append(median_ratio(ours, theirs))
    return ratios


def _busy(samples: Samples) -> bool:
    """Return whether other programs used the cores during too many restarts."""
    return sum(samples.busy) > BUSY * len(samples.busy)


def families(cases: Mapping[str, Clock]) -> dict[str, list[str]]:
    """Group cases by their clock: return the names of the cases of each group (family).

    The key `TOGETHER` has the cases that are timed by CPU time. The key `WALL_TOGETHER` has those
    that are timed by wall clock.

    Args:
        cases: The clock of each case, by the name of the case.
    """
    found: dict[str, list[str]] = {}
    for case, clock in cases.items():
        together = TOGETHER if clock == "cpu" else WALL_TOGETHER
        found.setdefault(together, []).append(case)
    return found


def least_restarts(limits: Limits, cases: Mapping[str, Clock], olds: int = 1) -> int:
    """Return the smallest number of restarts with which a result can be significant.

    `olds` is the number of old versions.
    """
    tests = 0
    for family in families(cases).values():
        tests += len(family) + (len(family) > 1)
    return needed(limits.alpha / max(1, olds * tests), paired=True)


def complaint(judged: Judgement, base: str, head: str, also: str | None) -> Error | None:
    """Return an error if head is worse, cannot run a case, or cannot be judged; otherwise None."""
    since = judged.called("worse", "also")
    parts = []
    if judged.worse:
        parts.append(f"worse than {base}: {', '.join(judged.worse)}")
    if since:
        parts.append(f"worse than {also}: {', '.join(since)}")
    if parts:
        return Worse("; ".join(parts))
    broken = {}
    for case, samples in judged.samples.items():
        if "head" in samples.unable:
            broken[case] = samples.unable["head"]
    if broken:
        cases = f"{many(len(broken), 'case')} cannot run in {head}: {', '.join(broken)}"
        reason = next(iter(broken.values()))
        return Error(f"{cases}: {reason}")
    for old, name in zip(OLDS, (base, also), strict=True):
        if name is not None and judged.samples and not judged.decisions[old]:
            return Error(f"no case runs in {name}, so nothing shows that there is no regression")
    disturbed = judged.called("disturbed", "base") or judged.called("disturbed", "also")
    if disturbed:
        return Error(
            f"cannot tell: other programs used the cores, which may have hidden that tasks of "
            f"{', '.join(disturbed)} wait or do not overlap; run it again on a quiet machine"
        )
    return None
