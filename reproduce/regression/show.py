"""Turn a judgement into what `compare` renders: two sides, and the table's content."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.numbers.compare import ComparedRow, Comparison
from reproduce.numbers.match import Line
from reproduce.numbers.metrics import Reading
from reproduce.numbers.significance import Rule
from reproduce.numbers.sources import Entry, Side, side_of
from reproduce.records.record import Record, Result, Run
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import METRIC, Judgement
from reproduce.tables.layout import many

__all__ = ["comparison", "sides"]


def sides(judged: Judgement, base: tuple[str, Run], head: tuple[str, Run]) -> list[Side]:
    """Return the two sides as `compare` has them: their names, and a record each."""
    found = []
    for letter, which, (name, run) in (("A", "base", base), ("B", "head", head)):
        results = [
            Result("regression", each.case, "measured", device="cpu", samples={"step_time": _flat(each.samples, which)})
            for each in judged.cases
            if not each.samples.unable
        ]
        found.append(side_of(letter, name, [Record(name, name, "measured", {"step_time": "s"}, results, run=run)]))
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
        rows.append(ComparedRow(line, readings, [None, each.decision]))
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
