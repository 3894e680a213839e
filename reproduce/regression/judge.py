"""Judge a job's samples: was a case, or all of them together, slowed down for real?

Samples of one process are no independent evidence: whatever makes this process quicker than that one is in all of
them, and more of them only make it more certain. So a restart gives one number, the median over its pairs of head
by base, and the rank test is over the restarts. Their geometric mean over the cases is judged likewise: it is less
noisy than any of them, and shows what slows all down. The risk of a false alarm is one for all of these tests: each has
an equal share of alpha (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from reproduce.numbers.compare import verdict
from reproduce.numbers.metrics import median_ratio
from reproduce.numbers.significance import Decision, Rule, compare_samples, needed
from reproduce.regression.job import Samples

__all__ = ["METRIC", "TOGETHER", "Judged", "Judgement", "judge", "least_restarts", "ratios", "shared"]

METRIC = "time"
TOGETHER = "all together"


@dataclass(frozen=True)
class Judged:
    """Hold a case, its samples, and how the head compares; no decision where a side cannot run it."""

    case: str
    samples: Samples
    decision: Decision | None


@dataclass(frozen=True)
class Judgement:
    """Hold every case, and how the head compares in all of them together; None where that is one case or none."""

    cases: Sequence[Judged]
    together: Decision | None

    @property
    def able(self) -> int:
        """Count the cases that both sides ran."""
        return sum(each.decision is not None for each in self.cases)

    @property
    def worse(self) -> list[str]:
        """Name what the head made slower for real."""
        decisions = {**{each.case: each.decision for each in self.cases}, TOGETHER: self.together}
        return [name for name, found in decisions.items() if found is not None and verdict(found, METRIC) == "worse"]


def shared(rule: Rule, cases: int) -> Rule:
    """Return the rule for each test where there are so many cases, so that `rule.alpha` is the risk of all tests."""
    return Rule(rule.alpha / (cases + 1 if cases > 1 else 1), rule.threshold)


def least_restarts(rule: Rule, cases: int) -> int:
    """Return with how many restarts anything can be significant at all."""
    return needed(shared(rule, cases).alpha, paired=True)


def ratios(samples: Samples) -> list[float]:
    """Return each restart's ratio, head by base."""
    return [median_ratio(head, base) for base, head in zip(samples.base, samples.head, strict=True)]


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Return how the head compares in every case, and in all of them."""
    able = {case: ratios(samples) for case, samples in found.items() if not samples.unable}
    each = shared(rule, len(able))

    def decided(of_restarts: Sequence[float]) -> Decision:
        return compare_samples([1.0] * len(of_restarts), of_restarts, each, paired=True)

    decisions = {case: decided(of_restarts) for case, of_restarts in able.items()}
    cases = [Judged(case, samples, decisions.get(case)) for case, samples in found.items()]
    means = [float(mean) for mean in stats.gmean(list(able.values()), axis=0)] if len(able) > 1 else []
    return Judgement(cases, decided(means) if means else None)
