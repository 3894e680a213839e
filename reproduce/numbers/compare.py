"""Compare the results of several sides, such as runs, with the first side, row by row.

Absolute numbers are compared if two rows did the same work on the same machine. Otherwise each
side's numbers are first divided by the numbers of a baseline row of the same side, and these ratios
are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Literal

from reproduce.numbers import notes
from reproduce.numbers.match import Line, grouped
from reproduce.numbers.metrics import DEFAULTS, DISTURBED, Reading, better, over, read
from reproduce.numbers.notes import HINT, TIMES
from reproduce.numbers.significance import Decision, Rule, compare_samples
from reproduce.numbers.sources import Side

Verdict = Literal["better", "worse", "differs", "~", "too few", "untested", "disturbed"]
Readings = Mapping[int, Reading]  # the number of a side -> the side's value (a reading) in one row
Measured = tuple[Line, Readings]


@dataclass(frozen=True)
class ComparedRow:
    """A line of the table: each side's value, and how each side compares with the first side.

    `readings` has None for a side without a value. `decisions` has None for a side that cannot be
    compared.
    """

    line: Line
    readings: list[Reading | None]
    decisions: list[Decision | None]


@dataclass(frozen=True)
class Comparison:
    """The rows of an experiment, compared in one metric.

    `together` is the decision about the geometric mean of the rows, if there is one.
    """

    experiment: str
    metric: str
    unit: str
    relative: bool
    rows: list[ComparedRow]
    notes: list[str] = field(default_factory=list)
    together: Decision | None = None

    def mean(self, side: int) -> tuple[float, int] | None:
        """Return the geometric mean of a side's ratios, and the number of ratios.

        If `together` is known, the mean is the ratio of `together`. The result is None if there is
        no ratio.
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
    """Return whether a decision of "higher" or "lower" is "better" or "worse" for this metric.

    Return "differs" if it is not known whether higher or lower values are better.
    """
    if decision.outcome == "higher" or decision.outcome == "lower":
        wanted = better(metric)
        if wanted is None:
            return "differs"
        return "better" if decision.outcome == wanted else "worse"
    return decision.outcome


def compare(  # noqa: PLR0913
    sides: Sequence[Side],
    lines: Sequence[Line],
    *,
    metric: str | None,
    rule: Rule,
    force: bool = False,
    every: bool = False,
    among: Sequence[Line] = (),
) -> tuple[list[Comparison], list[str]]:
    """Return a comparison for each experiment in which two sides have numbers, and notes.

    The notes are about all other experiments. The notes count the rows that only one side has, or
    name these rows if `every` is true. Without a `metric`, an experiment is compared in the first
    metric of `DEFAULTS` that two sides share. The baselines of speed-ups are looked for in `among`
    if it is given, and otherwise in `lines`.
    """
    asked = _Asked(sides, rule, force, every)
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
                letter = sides[holders.pop()].letter
                labels = [line.label for line in own]
                rows = notes.named(labels, every)
                on_one_side.setdefault(letter, []).append(f"{experiment} ({rows})")
            else:
                said.append(notes.nothing_shared(sides, own, metric))
    hint = "" if every else HINT
    for letter, names in on_one_side.items():
        said.append(f"only in {letter}: {', '.join(names)}{hint}")
    return comparisons, said


@dataclass(frozen=True)
class _Asked:
    """The arguments of `compare` that are the same for all experiments."""

    sides: Sequence[Side]
    rule: Rule
    force: bool
    every: bool


def _experiment(line: Line) -> str:
    return line.experiment


def _measured(lines: Sequence[Line], metric: str) -> list[Measured]:
    """Pair each line of the table with each side's value of the metric, if the side has a value."""
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
    asked: _Asked, measured: Sequence[Measured], bases: Sequence[Measured], metric: str
) -> Comparison:
    """Compare an experiment in one metric. Lines in `bases` can be baselines (divisors)."""
    shared = [(line, readings) for line, readings in measured if len(readings) > 1]
    unfair = notes.unfair([line for line, _ in shared], metric)
    relative = metric == "speedup" or (bool(unfair) and not asked.force)
    rows = []
    divided_by = []
    for line, readings in shared:
        base = None
        if relative:
            base, theirs = _base(line, readings, bases)
            readings = {side: over(readings[side], theirs[side]) for side in readings}
            divided_by.append(base.label)
        rows.append(_row(asked, line, readings, is_base=base is line))
    said = []
    if relative:
        what = metric.replace("speedup", "throughput")
        said.append(f"each side's {what} is divided by its own {notes.once(divided_by)}")
    if unfair:
        reasons = " and ".join(unfair)
        if asked.force and metric != "speedup":
            said.append(f"FORCED: absolute numbers are compared although {reasons}")
        else:
            said.append(f"absolute numbers are not compared: {reasons}")
    said += _notes(asked, measured, metric)
    disturbed, unit = _summary(rows)
    if disturbed:
        said.append(DISTURBED)
    experiment = measured[0][0].experiment
    return Comparison(experiment, metric, unit, relative, rows, said)


def _row(asked: _Asked, line: Line, readings: Readings, *, is_base: bool) -> ComparedRow:
    """Compare every side of a line with the first side. A baseline is not compared with itself."""
    values = [readings.get(side) for side in range(len(asked.sides))]
    first, *others = values
    decisions: list[Decision | None] = [None]
    for value in others:
        decision = None if is_base else _decision(first, value, asked.rule)
        decisions.append(decision)
    return ComparedRow(line, values, decisions)


def _decision(base: Reading | None, head: Reading | None, rule: Rule) -> Decision | None:
    if base is None or head is None or base.unit != head.unit:
        return None
    try:
        found = compare_samples(base.measurement, head.measurement, rule)
    except ValueError:  # zeros have no ratios
        return None
    if base.disturbed or head.disturbed:
        return replace(found, outcome="disturbed")
    return found


def _base(line: Line, own: Readings, bases: Sequence[Measured]) -> Measured:
    """Return the baseline line to divide by, and its values.

    Each side that has a value in this row must also have a value in the baseline. A line of the
    same kind (emulated, engine) is preferred, then a line of the same scale, then the row that
    `over` names, and then the first line.
    """
    ours = line.first.result

    def likeness(base: Measured) -> tuple[bool, ...]:
        theirs = base[0].first.result
        same_kind = theirs.emulated == ours.emulated and theirs.engine == ours.engine
        return same_kind, theirs.scale == ours.scale, theirs.row == ours.over

    possible = [base for base in bases if own.keys() <= base[1].keys()]
    return max(possible, key=likeness)


def _notes(asked: _Asked, measured: Sequence[Measured], metric: str) -> list[str]:
    """Return the notes about what differs between the matched rows, and about what is missing."""
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
    """Return whether any value in the rows was disturbed, and the units of the values."""
    disturbed = False
    units = set()
    for row in rows:
        for reading in filter(None, row.readings):
            units.add(reading.unit)
            disturbed |= reading.disturbed
    return disturbed, " or ".join(sorted(units))
