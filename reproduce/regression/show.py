"""Turn a judgement into what `compare` renders: two sides, and the table's content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reproduce.numbers.compare import ComparedRow, Comparison
from reproduce.numbers.match import Line
from reproduce.numbers.metrics import Reading
from reproduce.numbers.significance import Decision
from reproduce.numbers.sources import Side
from reproduce.records.record import Record, Run
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import METRIC, TOGETHER, Judgement
from reproduce.tables.layout import many


def side(letter: str, name: str, run: Run) -> Side:
    """Return a side as `compare` has it; its times are in the comparison."""
    return Side(letter, name, [], [Record(name, name, "measured", {}, [], run=run)])


def comparison(judged: Judgement, settings: Settings, alpha: float) -> Comparison:
    """Return the table's content, with what its reader has to know."""
    seen = {
        "cpu": "times are CPU time on one core; waiting and overlap are seen only with --clock wall",
        "wall": "times are wall-clock times on all cores",
    }
    planted = f" WITH A PLANTED DELAY of {settings.slow_down:.0%} in each step of B" if settings.slow_down else ""
    rows = [_row(case, samples, judged.decisions.get(case)) for case, samples in judged.samples.items()]
    notes = [
        seen[settings.clock],
        f"{many(settings.restarts, 'restart')} of both sides; in each, {many(settings.rounds, 'pair')} of samples of "
        "every case, in turn; a restart counts as one number, the median ratio of its pairs",
        f"the risk of calling noise significant, {alpha:g}, is shared by {many(len(judged.decisions), 'test')}",
        *_unable(judged.samples),
    ]
    return Comparison(f"regression{planted}", METRIC, "ms", False, rows, notes, judged.decisions.get(TOGETHER))


def _row(case: str, samples: Samples, decision: Decision | None) -> ComparedRow:
    readings: list[Reading | None] = [None, None]
    if decision is not None:
        for i, restarts in enumerate((samples.base, samples.head)):
            readings[i] = Reading([1000 * seconds for restart in restarts for seconds in restart], "ms")
    return ComparedRow(Line("regression", label=case), readings, [None, decision])


def _unable(found: Mapping[str, Samples]) -> Iterator[str]:
    """Say which cases a side cannot run, and why."""
    for which, letter in (("base", "A"), ("head", "B")):
        reasons = {case: samples.unable[which] for case, samples in found.items() if which in samples.unable}
        for reason in dict.fromkeys(reasons.values()):
            cases = ", ".join(case for case, why in reasons.items() if why == reason)
            yield f"not in {which} ({letter}): {cases}: {reason}"
