"""Judge a job's samples: was a case, or all of them together, slowed down for real?

Samples of one process are no independent evidence: whatever makes this process quicker than that one is in all of
them, and more of them only make it more certain. So a restart gives one number, the median over its pairs of head
by base, and the rank test is over the restarts. Their geometric mean over the cases is judged likewise: it is less
noisy than any of them, and shows what slows all down. The risk of a false alarm is one for all of these tests: each has
an equal share of alpha (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scipy import stats

from reproduce.numbers.compare import verdict
from reproduce.numbers.metrics import median_ratio
from reproduce.numbers.significance import Decision, Rule, compare_samples, needed
from reproduce.regression.job import Samples

METRIC = "time"
TOGETHER = "all together"


@dataclass(frozen=True)
class Judgement:
    """Hold the samples of every case, and how the head compares under the rule for each test.

    `decisions` has the cases that both sides ran, and, where these are several, all of them `TOGETHER`.
    """

    samples: Mapping[str, Samples]
    decisions: Mapping[str, Decision]
    rule: Rule

    @property
    def worse(self) -> list[str]:
        """Name what the head made slower for real."""
        return [name for name, decision in self.decisions.items() if verdict(decision, METRIC) == "worse"]


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Return how the head compares in every case, and in all of them; `rule.alpha` is the risk of all tests."""
    of_cases = {
        case: [median_ratio(head, base) for base, head in zip(samples.base, samples.head, strict=True)]
        for case, samples in found.items()
        if not samples.unable
    }
    if len(of_cases) > 1:
        of_cases[TOGETHER] = stats.gmean(list(of_cases.values()), axis=0).tolist()
    rule = _share(rule, len(of_cases))
    decisions = {
        case: compare_samples([1.0] * len(of_restarts), of_restarts, rule, paired=True)
        for case, of_restarts in of_cases.items()
    }
    return Judgement(found, decisions, rule)


def least_restarts(rule: Rule, cases: int) -> int:
    """Return with how many restarts anything can be significant at all."""
    return needed(_share(rule, cases + (cases > 1)).alpha, paired=True)


def _share(rule: Rule, tests: int) -> Rule:
    return Rule(rule.alpha / max(1, tests), rule.threshold)
