"""Decide whether the new code is slower than the old code.

The new version of the code is called `head`. It is compared with one or two old versions, called
`base` and `also`. `also` is older: it lies many changes before `head`.

Each case (a training step) is timed with all versions, in processes that are restarted many times:

1. A restart gives one ratio for each case: the median of (time of head / time of base) over its
   pairs of samples. The pairs of one restart are not independent, because a process can be faster
   or slower for its whole life. So they count as one number.
2. A rank test over the ratios of all restarts decides whether head is slower or faster.
3. The geometric mean of the ratios over all cases is tested in the same way. The mean is less noisy
   than a single case, and shows a change that slows all cases down a little.

There are two groups of cases, called families, and each family has its own mean. The cases of one
family are timed by CPU time. The cases of the other family are timed by wall clock, and show
whether devices work at the same time.

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
from reproduce.numbers.significance import TOO_WIDE, Decision, Rule, compare_samples, needed
from reproduce.regression.gates import Found
from reproduce.regression.job import Samples
from reproduce.regression.timed import Clock
from reproduce.tables.layout import many

METRIC, TOGETHER, WALL_TOGETHER = "time", "all together", "all by wall clock"
Old = Literal["base", "also"]
"""The old versions with which head is compared."""
OLDS: tuple[Old, ...] = ("base", "also")

ALSO = 0.1
"""The threshold of the comparison with the old version `also`.

Many changes of the code lie between `also` and the new version. Each of them may have made the code
slower by less than the threshold for `base`. So this threshold allows for the sum of these.
"""
WALL = 2.5
"""The factor of the thresholds for cases that are timed by wall clock, which have more noise."""
BUSY = 0.25
"""The largest share of restarts during which other programs may use the cores.

If the share is larger, a case that is timed by wall clock counts as disturbed. Tasks cannot overlap
on a core that another program uses, so one cannot see whether the new code has lost an overlap.
"""


@dataclass(frozen=True)
class Limits:
    """What counts as slower: how significant and how large a slow-down must be.

    Attributes:
        alpha: The accepted risk of a false alarm in all statistical tests together.
        threshold: The smallest slow-down that matters, as a fraction, in a comparison with the old
            version that is called `base`. It applies to cases that are timed by CPU time. For cases
            that are timed by wall clock, which is noisier, it is multiplied by `WALL`.
        also: The smallest slow-down that matters in a comparison with the other old version, which
            is called `also`.
    """

    alpha: float = 0.01
    threshold: float = 0.02
    also: float = ALSO

    def of(self, old: Old, together: str) -> float:
        """Return the smallest slow-down that matters, as a fraction.

        Args:
            old: The old version with which the new version is compared.
            together: The family of cases: `TOGETHER` if they are timed by CPU time, and
                `WALL_TOGETHER` if they are timed by wall clock.
        """
        own = self.threshold if old == "base" else self.also
        return own * WALL if together == WALL_TOGETHER else own


@dataclass(frozen=True)
class Judgement:
    """The samples of every case, and what the statistical tests decide from them.

    Attributes:
        samples: Maps the name of each case to its samples.
        decisions: For each old version, a dictionary of decisions. Its keys are the names of the
            cases that both the old and the new version ran. The key `TOGETHER` stands for the mean
            of the cases that are timed by CPU time, if there are several such cases. The key
            `WALL_TOGETHER` stands for the mean of the cases that are timed by wall clock.
        alpha: The accepted risk of a false alarm in a single test.
        gates: The findings of the gates, which are checks that measure no time.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[Old, Mapping[str, Decision]]
    alpha: float
    gates: Sequence[Found] = field(default_factory=list)

    @property
    def worse(self) -> list[str]:
        """Return the names of all gates, cases and means in which head is worse than base."""
        gates = [gate.name for gate in self.gates if gate.verdict == "worse"]
        return gates + self.called("worse", "base")

    def called(self, wanted: str, old: Old) -> list[str]:
        """Return the names of the cases (timed work), and means over cases, that have a verdict.

        Args:
            wanted: The verdict, such as "worse".
            old: The old version with which the new version was compared.
        """
        names = []
        for name, decision in self.decisions[old].items():
            if verdict(decision, METRIC) == wanted:
                names.append(name)
        return names


def judge(found: Mapping[str, Samples], limits: Limits, gates: Sequence[Found] = ()) -> Judgement:
    """Decide for each case (timed work) whether the new code (head) is slower than the old code.

    Also decide this for the mean of all cases that are timed by the same clock.

    Args:
        found: Maps the name of each case to its samples.
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
    """Return, for each restart, the median of (time of head / time of `old`) over its pairs.

    A pair is one sample of each of the two versions. If one version has no samples, return [].
    """
    before = samples.base if old == "base" else samples.also
    if not before or not samples.head:
        return []
    ratios = []
    for theirs, ours in zip(before, samples.head, strict=True):
        ratios.append(median_ratio(ours, theirs))
    return ratios


def _busy(samples: Samples) -> bool:
    """Return whether other programs used the cores in too many restarts: more than `BUSY` allows.

    `BUSY` is a share of all restarts of the timed processes.
    """
    return sum(samples.busy) > BUSY * len(samples.busy)


def families(cases: Mapping[str, Clock]) -> dict[str, list[str]]:
    """Group the cases (timed work) by their clock: CPU time or wall clock.

    In the result, the key `TOGETHER` has the names of the cases that are timed by CPU time. The key
    `WALL_TOGETHER` has the names of the cases that are timed by wall clock.

    Args:
        cases: Maps the name of each case to its clock: CPU time or wall clock.
    """
    found: dict[str, list[str]] = {}
    for case, clock in cases.items():
        together = TOGETHER if clock == "cpu" else WALL_TOGETHER
        found.setdefault(together, []).append(case)
    return found


def least_restarts(limits: Limits, cases: Mapping[str, Clock], olds: int = 1) -> int:
    """Return how many restarts of the timed processes a significant slow-down needs at least.

    Args:
        limits: What counts as slower, which includes the accepted risk of a false alarm.
        cases: Maps the name of each case to its clock: CPU time or wall clock.
        olds: The number of old versions. More versions and more cases mean more tests, which share
            the accepted risk.
    """
    tests = 0
    for family in families(cases).values():
        tests += len(family) + (len(family) > 1)
    return needed(limits.alpha / max(1, olds * tests), paired=True)


def complaint(judged: Judgement, base: str, head: str, also: str | None) -> Error | None:
    """Return an error if the new version is worse or cannot be judged; otherwise return None.

    It is also an error if the new version cannot run a case (timed work), or if an old version can
    run no case. The parameters `base`, `head` and `also` are the names of the old version, the new
    version and the second old version, for the error message.
    """
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
    return _unclear(judged)


def _unclear(judged: Judgement) -> Error | None:
    """Return an error if other programs or noise may have hidden a slow-down; else None."""
    disturbed = judged.called("disturbed", "base") or judged.called("disturbed", "also")
    if disturbed:
        return Error(
            f"cannot tell: other programs used the cores, which may have hidden that tasks of "
            f"{', '.join(disturbed)} wait or do not overlap; run it again on a quiet machine"
        )
    noisy: dict[str, None] = {}
    for decisions in judged.decisions.values():
        for name in judged.samples:
            if name in decisions and decisions[name].is_too_noisy:
                noisy[name] = None
    if noisy:
        return Error(
            f"cannot tell: the times of {', '.join(noisy)} vary so much that the "
            f"ends of the interval differ {TOO_WIDE:g}-fold or more; let a sample take longer "
            "(steps= of its case), or give more --restarts"
        )
    return None
