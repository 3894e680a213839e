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

import numpy
from scipy import stats

from reproduce.compare.judge import Comparison, Row, verdict
from reproduce.compare.match import Line
from reproduce.compare.metric import Reading
from reproduce.compare.sides import Entry, Side, gather
from reproduce.decide import Decision, Rule, decide, needed
from reproduce.layout import many
from reproduce.record import Record, Result, Run
from reproduce.regression.job import Samples, Settings

__all__ = ["TOGETHER", "Judged", "Judgement", "comparison", "judge", "least_restarts", "ratios", "shared", "sides"]

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
    logs = [numpy.log(head) - numpy.log(base) for base, head in zip(samples.base, samples.head, strict=True)]
    return [float(numpy.exp(numpy.median(of_restart))) for of_restart in logs]


def judge(found: Mapping[str, Samples], rule: Rule) -> Judgement:
    """Return how the head compares in every case, and in all of them."""
    able = {case: ratios(samples) for case, samples in found.items() if not samples.unable}
    each = shared(rule, len(able))

    def decided(of_restarts: Sequence[float]) -> Decision:
        return decide([1.0] * len(of_restarts), of_restarts, each, paired=True)

    decisions = {case: decided(of_restarts) for case, of_restarts in able.items()}
    cases = [Judged(case, samples, decisions.get(case)) for case, samples in found.items()]
    means = [float(mean) for mean in stats.gmean(list(able.values()), axis=0)] if len(able) > 1 else []
    return Judgement(cases, decided(means) if means else None)


# --- as `compare` shows it -------------------------------------------------------------------------------------------


def sides(judged: Judgement, base: tuple[str, Run], head: tuple[str, Run]) -> list[Side]:
    """Return the two sides as `compare` has them: their names, and a record each."""
    found = []
    for letter, which, (name, run) in (("A", "base", base), ("B", "head", head)):
        results = [
            Result("regression", each.case, "measured", device="cpu", samples={"step_time": _flat(each.samples, which)})
            for each in judged.cases
            if not each.samples.unable
        ]
        found.append(gather(letter, name, [Record(name, name, "measured", {"step_time": "s"}, results, run=run)]))
    return found


def comparison(judged: Judgement, both: Sequence[Side], settings: Settings, rule: Rule) -> Comparison:
    """Return the table's content, with what its reader has to know."""
    rows = []
    for each in judged.cases:
        line = Line("regression", label=each.case)
        readings: list[Reading | None] = [None, None]
        for i, side in enumerate(both):
            entry = next((entry for entry in side.entries if entry.result.row == each.case), None)
            if entry is not None:
                line.entries[i] = entry
                readings[i] = Reading([1000 * seconds for seconds in _samples(entry)], "ms")
        rows.append(Row(line, readings, [None, each.decision]))
    planted = f" WITH A PLANTED DELAY of {settings.slow_down:.0%} in each step of B" if settings.slow_down else ""
    return Comparison(
        f"regression{planted}", METRIC, "ms", False, rows, _notes(judged, settings, rule), judged.together
    )


def _notes(judged: Judgement, settings: Settings, rule: Rule) -> list[str]:
    tests = judged.able + (judged.together is not None)
    notes = [
        f"{many(settings.restarts, 'restart')} of both sides, and in each {many(settings.rounds, 'pair')} of samples "
        "of a case, in turn; what is judged is a restart's median ratio",
        f"{many(tests, 'test')} share the risk of calling noise significant, {rule.alpha:g}",
    ]
    for which, where in (("base", "A"), ("head", "B")):
        unable = {each.case: each.samples.unable[which] for each in judged.cases if which in each.samples.unable}
        for why in dict.fromkeys(unable.values()):
            named = ", ".join(case for case, said in unable.items() if said == why)
            notes.append(f"not in {which} ({where}): {named}: {why}")
    return notes


def _samples(entry: Entry) -> list[float]:
    return entry.result.samples["step_time"]


def _flat(samples: Samples, which: str) -> list[float]:
    restarts: list[list[float]] = getattr(samples, which)
    return [seconds for restart in restarts for seconds in restart]
