"""Compare the results of several sides with the results of the first side, row by row.

A side is what the user names, such as a run, a folder of records, or a git revision. A row is a
configuration that was run. Rows that did the same work on the same machine are compared by their
absolute numbers. For other rows, the numbers of each side are first divided by the numbers of a
baseline row of the same side, and the ratios are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Literal

from reproduce.numbers import notes
from reproduce.numbers.baseline import (
    CHANGED,
    Measured,
    Readings,
    baseline,
    decide,
    differing_baseline,
)
from reproduce.numbers.match import Line, grouped
from reproduce.numbers.metrics import DEFAULTS, DISTURBED, Reading, better, over, read
from reproduce.numbers.notes import HINT, TIMES
from reproduce.numbers.significance import Decision, Rule
from reproduce.numbers.sources import Side

Verdict = Literal[
    "better", "worse", "differs", "~", "too few", "untested", "disturbed", "base differs"
]


@dataclass(frozen=True)
class ComparedRow:
    """A line of the comparison's table: the value of a metric on each side, such as each run.

    Attributes:
        line: The rows of this line, one for each side.
        readings: The value of each side. It is None for a side without a value.
        decisions: The result of comparing each side with the first side. It is None for the first
            side, and for a side that cannot be compared.
        is_base: Whether the numbers of other lines were divided by the numbers of this line.
    """

    line: Line
    readings: list[Reading | None]
    decisions: list[Decision | None]
    is_base: bool = False


@dataclass(frozen=True)
class Comparison:
    """A comparison of two or more sides (such as runs) in one metric, for an experiment's rows.

    A row is a configuration that was run.

    Attributes:
        relative: Whether the numbers of each side were divided by a baseline row of this side.
        notes: Sentences that explain the comparison to the user.
        together: The result of comparing the geometric means of all rows, if they were compared.
        unfair: Why absolute numbers were not compared; empty if they were.
    """

    experiment: str
    metric: str
    unit: str
    relative: bool
    rows: list[ComparedRow]
    notes: list[str] = field(default_factory=list)
    together: Decision | None = None
    unfair: str = ""

    def mean(self, side: int) -> tuple[float, int] | None:
        """Return the geometric mean of a side's ratios to the first side, and the number of ratios.

        A side is, for example, a run. Rows that other programs disturbed are left out. If
        `together` is not None, its ratio is the mean. The result is None if there is no ratio.
        """
        ratios = []
        for row in self.rows:
            decision = row.decisions[side]
            if decision is not None and decision.outcome != "disturbed":
                ratios.append(decision.ratio)
        if not ratios:
            return None
        mean = geometric_mean(ratios) if self.together is None else self.together.ratio
        return mean, len(ratios)


def verdict(decision: Decision, metric: str) -> Verdict:
    """Return the verdict of a comparison in a metric, such as "better" or "worse".

    The outcomes "higher" and "lower" become "better" or "worse". If it is not known whether higher
    values of the metric are better, both become "differs". Other outcomes do not change.
    """
    if decision.outcome == "higher" or decision.outcome == "lower":
        wanted = better(metric)
        if wanted is None:
            return "differs"
        return "better" if decision.outcome == wanted else "worse"
    return decision.outcome


@dataclass(frozen=True)
class Asked:
    """Which sides to compare, and how.

    Attributes:
        sides: The sides, such as runs. Each later side is compared with the first one.
        rule: What counts as a difference.
        force: Whether to compare absolute numbers even of different machines or different work.
        every: Whether notes name the rows that only one side has. If not, notes give their number.
    """

    sides: Sequence[Side]
    rule: Rule
    force: bool = False
    every: bool = False


def compare(
    asked: Asked, lines: Sequence[Line], metric: str | None = None, among: Sequence[Line] = ()
) -> tuple[list[Comparison], list[str]]:
    """Compare sides, such as runs, in each experiment.

    Args:
        asked: The sides, and the options of the comparison.
        lines: The lines of the table. Each line has matching rows (configurations), at most one of
            each side.
        metric: The metric to compare. By default, the first of `DEFAULTS` that two sides have.
        among: The lines among which to look for the baselines of speed-ups. By default, `lines`.

    Returns:
        A comparison for each experiment in which two sides have numbers, and notes about all other
        experiments.
    """
    comparisons = []
    said = []
    on_one_side: dict[str, list[str]] = {}
    baselines = grouped(among or lines, _experiment)
    for experiment, own in grouped(lines, _experiment).items():
        for name in [metric] if metric else DEFAULTS:
            measured = _measured(own, name)
            if any(len(readings) > 1 for _, readings in measured):
                bases = _measured(baselines.get(experiment, []), name)
                comparisons.append(_compare(asked, measured, bases, name))
                break
        else:
            holders: set[int] = set()
            for line in own:
                holders.update(line.entries)
            if len(holders) == 1:
                letter = asked.sides[holders.pop()].letter
                labels = [line.label for line in own]
                rows = notes.named(labels, asked.every)
                on_one_side.setdefault(letter, []).append(f"{experiment} ({rows})")
            else:
                said.append(notes.nothing_shared(asked.sides, own, metric, asked.every))
    hint = "" if asked.every else HINT
    for letter, names in on_one_side.items():
        said.append(f"only in {letter}: {', '.join(names)}{hint}")
    return comparisons, said


def _experiment(line: Line) -> str:
    return line.experiment


def _measured(lines: Sequence[Line], metric: str) -> list[Measured]:
    """Return a list of pairs: a line of a comparison, and a dictionary with the line's values.

    The dictionary maps the index of each side (such as a run) to the value of the metric `metric`
    on this side. A side without a value is left out.
    """
    measured: list[Measured] = []
    for line in lines:
        readings = {}
        for side, entry in line.entries.items():
            reading = read(entry, metric)
            if reading is not None:
                readings[side] = reading
        measured.append((line, readings))
    return measured


def _compare(
    asked: Asked, measured: Sequence[Measured], bases: Sequence[Measured], metric: str
) -> Comparison:
    """Compare the rows (configurations) of an experiment in one metric, between sides such as runs.

    If the rows did different work or ran on different machines, ratios are compared: each side's
    numbers are first divided by the side's number for a baseline row, which is one of `bases`.
    """
    shared = [(line, readings) for line, readings in measured if len(readings) > 1]
    unfair = notes.unfair([line for line, _ in shared], metric)
    relative = metric == "speedup" or (bool(unfair) and not asked.force)
    said: list[str] = []
    if relative:
        rows, said = _relative_rows(asked, shared, bases, metric)
    else:
        rows = [_row(asked, line, readings) for line, readings in shared]
    if unfair and not relative:
        said.append(f"FORCED: absolute numbers are compared although {unfair}")
        unfair = ""
    elif unfair:
        what = "speed is" if metric in TIMES else "numbers are"
        unfair = f"absolute {what} not judged: {unfair}"
        said.append(unfair)
    said += _notes(asked, measured, metric)
    disturbed, unit = _summary(rows)
    if disturbed:
        said.append(DISTURBED)
    experiment = measured[0][0].experiment
    return Comparison(experiment, metric, unit, relative, rows, said, unfair=unfair)


def _relative_rows(
    asked: Asked, shared: Sequence[Measured], bases: Sequence[Measured], metric: str
) -> tuple[list[ComparedRow], list[str]]:
    """Compare runs (or other sides) by ratios, because their absolute numbers cannot be compared.

    For each run, the number of a row (a configuration) is divided by the number of a baseline row
    of the same run. Then these ratios are compared between the runs.

    Args:
        asked: The runs or other sides, and the options of the comparison.
        shared: The rows that at least two sides have, with the values of these sides.
        bases: The rows that can be baselines.
        metric: The metric to compare.

    Returns:
        The rows, and notes about the baselines.
    """
    rows = []
    of_base: dict[int, tuple[Measured, list[ComparedRow]]] = {}
    for line, readings in shared:
        base = baseline(line, readings, bases)
        base_line, theirs = base
        ratios = {side: over(readings[side], theirs[side]) for side in readings}
        row = _row(asked, line, ratios, is_base=base_line is line)
        rows.append(row)
        of_base.setdefault(id(base_line), (base, []))[1].append(row)
    divided_by = [base[0].label for base, _ in of_base.values()]
    what = metric.replace("speedup", "throughput")
    said = [f"each side's {what} is divided by its own {notes.once(divided_by)}"]
    for base, own in of_base.values():
        said += _distrust(asked, base, own)
    return rows, said


def _distrust(asked: Asked, base: Measured, rows: Sequence[ComparedRow]) -> list[str]:
    """Withdraw verdicts about ratios to a baseline row that has itself become faster or slower.

    Return notes that say for which sides (such as runs) the verdicts about `rows` are withdrawn,
    because their baseline `base` has changed.
    """
    said = []
    for number, side in enumerate(asked.sides):
        decisions = [row.decisions[number] for row in rows]
        itself = differing_baseline(base, number, decisions, asked.rule) if number else None
        if itself is None:
            continue
        for row, decision in zip(rows, decisions, strict=True):
            if decision is not None and decision.outcome in (*CHANGED, "~"):
                row.decisions[number] = replace(decision, outcome="base differs")
        said.append(
            f"{base[0].label} itself differs in {side.letter} ({itself.ratio:.2f} times A's), so "
            "ratios to it are not judged"
        )
    return said


def _row(asked: Asked, line: Line, readings: Readings, *, is_base: bool = False) -> ComparedRow:
    """Compare, in one line, the value of each side (such as a run) with the first side's value.

    The line of the baseline is not compared, because all its ratios are 1.
    """
    values = [readings.get(side) for side in range(len(asked.sides))]
    first, *others = values
    decisions: list[Decision | None] = [None]
    for value in others:
        decision = None if is_base else decide(first, value, asked.rule)
        decisions.append(decision)
    return ComparedRow(line, values, decisions, is_base)


def _notes(asked: Asked, measured: Sequence[Measured], metric: str) -> list[str]:
    """Return notes on how compared rows differ, and on rows that are missing on a side.

    For example, two compared rows (configurations) can come from different versions of PyTorch.
    """
    lines = []
    have = []
    shared = []
    for line, readings in measured:
        lines.append(line)
        have.append(set(readings))
        if len(readings) > 1:
            shared.append(line)
    said = notes.other_differences(shared)
    said += notes.missing(asked.sides, lines, have, asked.every)
    if metric in TIMES:
        said += notes.other_times(asked.sides, shared)
    return said


def _summary(rows: Sequence[ComparedRow]) -> tuple[bool, str]:
    """Return whether other programs disturbed any of the rows, and the units of the values."""
    disturbed = False
    units = set()
    for row in rows:
        for reading in filter(None, row.readings):
            units.add(reading.unit)
            disturbed |= reading.disturbed
    return disturbed, " or ".join(sorted(units))
