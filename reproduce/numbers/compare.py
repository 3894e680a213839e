"""Compare every side with the first, row by row: in absolute numbers where that is fair, else in ratios.

Absolute numbers are compared only between rows that did the same work on the same machine. Otherwise each side's
numbers are first divided by those of a baseline row of the same side, and these ratios are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Literal

from reproduce.numbers.match import Line, differing, same_work
from reproduce.numbers.metrics import (
    DEFAULTS,
    DISTURBED,
    Reading,
    available,
    better,
    outcome,
    over,
    read,
)
from reproduce.numbers.significance import Decision, Rule, compare_samples
from reproduce.numbers.sources import Entry, Side
from reproduce.records.record import SUCCESS

TIMES = ("throughput", "speedup", "time", "step_time")
Verdict = Literal["better", "worse", "differs", "~", "too few", "untested", "disturbed"]
HINT = "; --all names them"
IN_TURN = (
    "python -m reproduce regression --base REV --head REV runs the code of two revisions, in turn"
)
Readings = Mapping[int, Reading]  # a row's reading on each side that has one, by the side's number


@dataclass(frozen=True)
class ComparedRow:
    """Hold a line of the table: each side's reading, and how each side compares with the first.

    `readings` has None for a side without a number, `decisions` for one that cannot be compared.
    """

    line: Line
    readings: list[Reading | None]
    decisions: list[Decision | None]


@dataclass(frozen=True)
class Comparison:
    """Hold the rows of an experiment, compared in one metric. `together` judges their geometric mean, if known."""

    experiment: str
    metric: str
    unit: str
    relative: bool
    rows: list[ComparedRow]
    notes: list[str] = field(default_factory=list)
    together: Decision | None = None

    def mean(self, side: int) -> tuple[float, int] | None:
        """Return the geometric mean of a side's ratios, from `together` if known, and their number; None if none."""
        decisions = [
            each
            for row in self.rows
            if (each := row.decisions[side]) and each.outcome != "disturbed"
        ]
        ratios = [decision.ratio for decision in decisions]
        if not ratios:
            return None
        return geometric_mean(ratios) if self.together is None else self.together.ratio, len(ratios)


def verdict(decision: Decision, metric: str) -> Verdict:
    """Turn higher and lower into better and worse, if it is known which is better for the metric."""
    if decision.outcome == "higher" or decision.outcome == "lower":
        wanted = better(metric)
        return "differs" if wanted is None else "better" if decision.outcome == wanted else "worse"
    return decision.outcome


def compare(
    sides: Sequence[Side],
    lines: Sequence[Line],
    *,
    metric: str | None,
    rule: Rule,
    force: bool = False,
    every: bool = False,
    among: Sequence[Line] = (),
) -> tuple[list[Comparison], list[str]]:
    """Return a comparison for each experiment of which two sides have numbers, and notes about the others.

    Without a `metric`, an experiment is compared in the first of `DEFAULTS` that two sides share. Notes count the rows
    that only one side has, or name them if `every`. The baselines of speed-ups may be other lines, `among` which.
    """
    comparisons, notes = [], []
    on_one_side: dict[str, list[str]] = {}
    for experiment in dict.fromkeys(line.experiment for line in lines):
        own = [line for line in lines if line.experiment == experiment]
        for name in [metric] if metric else DEFAULTS:
            readings = [_readings(line, name) for line in own]
            if any(len(each) > 1 for each in readings):
                bases = [
                    (line, _readings(line, name))
                    for line in among or lines
                    if line.experiment == experiment
                ]
                comparisons.append(_compare(sides, own, readings, bases, name, rule, force, every))
                break
        else:
            holders = {number for line in own for number in line.entries}
            if len(holders) == 1:
                rows = f"{experiment} ({_rows([line.label for line in own], every)})"
                on_one_side.setdefault(sides[holders.pop()].letter, []).append(rows)
            else:
                notes.append(_nothing_shared(sides, own, metric))
    hint = "" if every else HINT
    only = [f"only in {letter}: {', '.join(names)}{hint}" for letter, names in on_one_side.items()]
    return comparisons, [*notes, *only]


def _readings(line: Line, metric: str) -> Readings:
    return {
        side: found
        for side, entry in line.entries.items()
        if (found := read(entry, metric)) is not None
    }


def _compare(
    sides: Sequence[Side],
    lines: Sequence[Line],
    readings: Sequence[Readings],
    among: Sequence[tuple[Line, Readings]],
    metric: str,
    rule: Rule,
    force: bool,
    every: bool,
) -> Comparison:
    shared = [(line, own) for line, own in zip(lines, readings, strict=True) if len(own) > 1]
    unfair = _unfair([line for line, _ in shared], metric)
    relative = metric == "speedup" or (bool(unfair) and not force)
    bases: list[str] = []
    rows = []
    for line, own in shared:
        is_base = False
        if relative:
            base, theirs = _base(line, own, among)
            bases.append(base.label)
            is_base = base is line
            own = {
                side: over(reading, theirs[side]) for side, reading in own.items() if side in theirs
            }
        values = [own.get(side) for side in range(len(sides))]
        decisions = [
            None if is_base or not i else _decision(values[0], values[i], rule)
            for i in range(len(sides))
        ]
        rows.append(ComparedRow(line, values, decisions))
    notes = []
    if relative:
        notes.append(
            f"each side's {metric.replace('speedup', 'throughput')} is divided by its own {_once(bases)}"
        )
    if unfair and metric != "speedup" and force:
        notes.append(f"FORCED: absolute numbers are compared although {' and '.join(unfair)}")
    elif unfair:
        notes.append(f"absolute numbers are not compared: {' and '.join(unfair)}")
    notes += [
        *_other_differences([line for line, _ in shared]),
        *_missing(sides, lines, readings, every),
    ]
    notes += _other_times(sides, [line for line, _ in shared]) if metric in TIMES else []
    known = [reading for row in rows for reading in row.readings if reading is not None]
    notes += [DISTURBED] if any(reading.disturbed for reading in known) else []
    units = {reading.unit for reading in known}
    return Comparison(
        lines[0].experiment, metric, " or ".join(sorted(units)), relative, rows, notes
    )


def _decision(base: Reading | None, head: Reading | None, rule: Rule) -> Decision | None:
    if base is None or head is None or base.unit != head.unit:
        return None
    try:
        found = compare_samples(base.measurement, head.measurement, rule)
    except ValueError:  # zeros have no ratios
        return None
    return replace(found, outcome="disturbed") if base.disturbed or head.disturbed else found


def _base(
    line: Line, own: Readings, lines: Sequence[tuple[Line, Readings]]
) -> tuple[Line, Readings]:
    """Return the baseline line to divide by, one for which all sides of this row have a number.

    It prefers the same kind (emulated, engine), then the same scale, then the row that `over` names, then the first.
    """
    ours = line.first.result

    def likeness(pair: tuple[Line, Readings]) -> tuple[bool, ...]:
        theirs = pair[0].first.result
        alike = (theirs.emulated, theirs.engine) == (ours.emulated, ours.engine)
        return alike, theirs.scale == ours.scale, theirs.row == ours.over

    return max((pair for pair in lines if own.keys() <= pair[1].keys()), key=likeness)


# --- notes below the table ------------------------------------------------------------------------------------------


def _machine(entry: Entry) -> object:
    """Return a key. Absolute times are comparable only between records with equal keys."""
    run = entry.record.run
    if run is None:
        return entry.result.hardware or entry.record.hardware or entry.record.name
    machine = run.machine
    memory = machine.memory and machine.memory >> 30
    return (
        machine.cpu,
        machine.cores,
        memory,
        [gpu.name for gpu in machine.gpus],
        run.device,
        run.threads_per_device,
    )


def _pairs(lines: Sequence[Line]) -> Iterator[tuple[Entry, Entry]]:
    """Yield each line's first row with every other one."""
    for line in lines:
        first, *others = line.entries.values()
        yield from ((first, other) for other in others)


def _unfair(lines: Sequence[Line], metric: str) -> list[str]:
    """Return why absolute numbers are not comparable. Only `TIMES` depend on the machine."""
    reasons = []
    if metric in TIMES and any(
        _machine(first) != _machine(other) for first, other in _pairs(lines)
    ):
        reasons.append("the sides ran on different machines")
    if not all(same_work(first, other) for first, other in _pairs(lines)):
        reasons.append("matched rows did different work")
    return reasons


def _other_differences(lines: Sequence[Line]) -> list[str]:
    """Say which other fields and versions differ between matched rows."""
    fields: list[str] = []
    versions: dict[str, list[str]] = {}
    for first, other in _pairs(lines):
        fields += differing(first, other)
        if first.record.run is not None and other.record.run is not None:
            theirs = other.record.run.versions
            for name, version in first.record.run.versions.items():
                if version != theirs.get(name):
                    versions.setdefault(name, []).extend([str(version), str(theirs.get(name))])
    notes = [f"matched rows also differ in: {_once(fields)}"] if fields else []
    return notes + [
        f"{name} differs: {' / '.join(dict.fromkeys(both))}" for name, both in versions.items()
    ]


def _other_times(sides: Sequence[Side], lines: Sequence[Line]) -> list[str]:
    """Say what a verdict between runs of different times shows, if there is one, and what it does not."""
    started = [{x.record.run and x.record.run.started for x in pair} for pair in _pairs(lines)]
    if not any(len(times) > 1 and None not in times for times in started):
        return []
    runs = {
        side.letter: [result for x in side.records if x.run for result in x.results]
        for side in sides
    }
    unknown = [
        letter
        for letter, found in runs.items()
        if found and not any("others" in x.samples for x in found)
    ]
    how = (
        f"; how busy others kept the machine is not known of {' and '.join(unknown)}"
        if unknown
        else ""
    )
    return [
        f"the sides ran at different times: a verdict says that these runs differ, not why{how}; {IN_TURN}"
    ]


def _missing(
    sides: Sequence[Side], lines: Sequence[Line], readings: Sequence[Readings], every: bool
) -> list[str]:
    """Say which rows a side lacks, or how many, and which have no number, and why."""
    labels: dict[str, list[str]] = {}
    for line, own in zip(lines, readings, strict=True):
        letters: dict[str, list[str]] = {}
        for number, side in enumerate(sides):
            if number not in line.entries:
                letters.setdefault("missing", []).append(side.letter)
            elif number not in own:
                result = line.entries[number].result
                why = "" if result.status in SUCCESS else f" ({outcome(result)})"
                letters.setdefault(f"no number{why}", []).append(side.letter)
        for what, where in letters.items():
            labels.setdefault(f"{what} in {' and '.join(where)}", []).append(line.label)
    return [f"{what}: {_rows(rows, every)}{'' if every else HINT}" for what, rows in labels.items()]


def _nothing_shared(sides: Sequence[Side], lines: Sequence[Line], metric: str | None) -> str:
    """Say which metrics each side has, when no row has the same metric on two sides."""
    experiment = lines[0].experiment
    if metric is not None:
        return f"{experiment}: {metric} is not on two sides of any row"
    has = []
    for number, side in enumerate(sides):
        entries = [line.entries[number] for line in lines if number in line.entries]
        if entries:
            has.append(f"{side.letter} has {', '.join(available(entries)) or 'no number'}")
    return f"{experiment}: no row has the same metric on two sides: {'; '.join(has)}"


def _rows(labels: Sequence[str], every: bool) -> str:
    """Name rows, or count them."""
    return _once(labels) if every else f"{len(labels)} row{'s' * (len(labels) != 1)}"


def _once(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(labels))
