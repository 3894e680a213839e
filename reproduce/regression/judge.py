"""Judge a job's samples: was a case slowed down for real?

Samples of one process are no independent evidence: whatever makes this process quicker than that one is in all of
them, and more of them only make it more certain. So a restart gives one number, the median over its pairs of head by
base, and the rank test is over the restarts. Several cases are judged at once, and the risk of a false alarm is one for
all of them: each has its share of alpha (Bonferroni).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reproduce.compare.judge import Comparison, Row, verdict
from reproduce.compare.match import Line
from reproduce.compare.metric import Reading
from reproduce.compare.sides import Entry, Side, gather
from reproduce.decide import Decision, Rule, decide, needed
from reproduce.layout import many
from reproduce.record import Record, Result, Run
from reproduce.regression.job import Samples, Settings

__all__ = ["Judged", "comparison", "judge", "least_restarts", "ratios", "shared", "sides", "worse"]

METRIC = "time"


@dataclass(frozen=True)
class Judged:
    """Hold a case, its samples, and how the head compares; no decision where a side cannot run it."""

    case: str
    samples: Samples
    decision: Decision | None


def shared(rule: Rule, cases: int) -> Rule:
    """Return the rule for each of so many cases, so that `rule.alpha` is the risk of all together."""
    return Rule(rule.alpha / max(cases, 1), rule.threshold)


def least_restarts(rule: Rule, cases: int) -> int:
    """Return with how many restarts anything can be significant at all."""
    return needed(shared(rule, cases).alpha, paired=True)


def ratios(samples: Samples) -> list[float]:
    """Return each restart's ratio, head by base: the median over its pairs."""
    return [
        statistics.median(new / old for old, new in zip(*restart, strict=True))
        for restart in zip(samples.base, samples.head, strict=True)
    ]


def judge(found: Mapping[str, Samples], rule: Rule) -> list[Judged]:
    """Return every case with its decision, by the rule that is for all of them."""
    able = [case for case, samples in found.items() if not samples.unable]
    each = shared(rule, len(able))
    decisions: dict[str, Decision] = {}
    for case in able:
        of_restarts = ratios(found[case])
        decisions[case] = decide([1.0] * len(of_restarts), of_restarts, each, paired=True)
    return [Judged(case, samples, decisions.get(case)) for case, samples in found.items()]


def worse(judged: Sequence[Judged]) -> list[str]:
    """Return the cases that the head made slower for real."""
    return [each.case for each in judged if each.decision is not None and verdict(each.decision, METRIC) == "worse"]


# --- as `compare` shows it -------------------------------------------------------------------------------------------


def sides(judged: Sequence[Judged], base: tuple[str, Run], head: tuple[str, Run]) -> list[Side]:
    """Return the two sides as `compare` has them: their names, and a record each."""
    found = []
    for letter, which, (name, run) in (("A", "base", base), ("B", "head", head)):
        results = [
            Result("regression", each.case, "measured", device="cpu", samples={"step_time": _flat(each.samples, which)})
            for each in judged
            if not each.samples.unable
        ]
        found.append(gather(letter, name, [Record(name, name, "measured", {"step_time": "s"}, results, run=run)]))
    return found


def comparison(judged: Sequence[Judged], both: Sequence[Side], settings: Settings, rule: Rule) -> Comparison:
    """Return the table's content, with what its reader has to know."""
    rows = []
    for each in judged:
        line = Line("regression", label=each.case)
        readings: list[Reading | None] = [None, None]
        for i, side in enumerate(both):
            entry = next((entry for entry in side.entries if entry.result.row == each.case), None)
            if entry is not None:
                line.entries[i] = entry
                readings[i] = Reading([1000 * seconds for seconds in _samples(entry)], "ms")
        rows.append(Row(line, readings, [None, each.decision]))
    planted = f" WITH A PLANTED DELAY of {settings.slow_down:.0%} in each step of B" if settings.slow_down else ""
    return Comparison(f"regression{planted}", METRIC, "ms", False, rows, _notes(judged, settings, rule))


def _notes(judged: Sequence[Judged], settings: Settings, rule: Rule) -> list[str]:
    able = sum(not each.samples.unable for each in judged)
    notes = [
        f"{many(settings.restarts, 'restart')} of both sides, and in each {many(settings.rounds, 'pair')} of samples "
        "of a case, in turn; a case is judged by its restarts' medians",
        f"{many(able, 'case')} share the risk of calling noise significant, {rule.alpha:g}",
    ]
    for which, where in (("base", "A"), ("head", "B")):
        unable = {each.case: each.samples.unable[which] for each in judged if which in each.samples.unable}
        for why in dict.fromkeys(unable.values()):
            named = ", ".join(case for case, said in unable.items() if said == why)
            notes.append(f"not in {which} ({where}): {named}: {why}")
    return notes


def _samples(entry: Entry) -> list[float]:
    return entry.result.samples["step_time"]


def _flat(samples: Samples, which: str) -> list[float]:
    restarts: list[list[float]] = getattr(samples, which)
    return [seconds for restart in restarts for seconds in restart]
