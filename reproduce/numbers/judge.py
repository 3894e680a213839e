"""Judge matched rows: every side against the first, in absolute numbers where that is fair, else in ratios.

Absolute numbers are compared only between rows that did the same work on the same machine. Otherwise each side's
numbers are first divided by those of one of its own rows, and it is these ratios that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reproduce.numbers.match import Line, differing, same_work
from reproduce.numbers.metric import DEFAULTS, Reading, available, better, over, read
from reproduce.numbers.significance import Decision, Rule, decide
from reproduce.numbers.sources import Entry, Side
from reproduce.tables.layout import many

__all__ = ["Comparison", "Row", "Verdict", "compare", "verdict"]

TIMES = ("throughput", "speedup", "time", "step_time")
Verdict = Literal["better", "worse", "differs", "~", "too few", "untested"]


@dataclass(frozen=True)
class Row:
    """Hold a line, what each side says of it, and how each compares with the first side.

    `readings` has None for a side that says nothing, `decisions` where there is nothing to decide. `base` marks the
    row that the others were divided by.
    """

    line: Line
    readings: list[Reading | None]
    decisions: list[Decision | None]
    base: bool = False


@dataclass(frozen=True)
class Comparison:
    """Hold a table: the rows of an experiment in one metric. `together` judges their mean, where that can be."""

    experiment: str
    metric: str
    unit: str
    relative: bool
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    together: Decision | None = None

    def mean(self, side: int) -> tuple[float, int] | None:
        """Return the geometric mean of a side's ratios, as judged where it was, and of how many; None without any."""
        found = [row.decisions[side] for row in self.rows if not row.base]
        logs = [math.log(decision.ratio) for decision in found if decision is not None]
        if not logs:
            return None
        return math.exp(math.fsum(logs) / len(logs)) if self.together is None else self.together.ratio, len(logs)

    def verdicts(self) -> Iterable[Verdict]:
        """Yield every verdict in the table."""
        for row in self.rows:
            yield from (verdict(decision, self.metric) for decision in row.decisions if decision is not None)


def verdict(decision: Decision, metric: str) -> Verdict:
    """Say what a decision means where the metric has a better side."""
    if decision.outcome in ("same", "too few", "untested"):
        return {"same": "~", "too few": "too few", "untested": "untested"}[decision.outcome]  # type: ignore[return-value]
    wanted = better(metric)
    return "differs" if wanted is None else "better" if decision.outcome == wanted else "worse"


def compare(
    sides: Sequence[Side], lines: Sequence[Line], *, metric: str | None, rule: Rule, force: bool = False
) -> tuple[list[Comparison], list[str]]:
    """Return a table for each experiment in which two sides say something, and notes about the others.

    Without a `metric` an experiment is compared in the first of the usual ones that two sides share.
    """
    tables, notes = [], []
    alone: dict[str, list[str]] = {}
    for experiment in dict.fromkeys(line.experiment for line in lines):
        found = [line for line in lines if line.experiment == experiment]
        chosen = metric or next((name for name in DEFAULTS if _shared(found, name)), None)
        if chosen is not None and _shared(found, chosen):
            tables.append(_compare(sides, found, chosen, rule, force))
        elif len(holders := {number for line in found for number in line.entries}) == 1:
            alone.setdefault(sides[holders.pop()].letter, []).append(f"{experiment} ({many(len(found), 'row')})")
        else:
            notes.append(_nothing(sides, found, metric))
    return tables, [*notes, *(f"only in {letter}: {', '.join(names)}" for letter, names in alone.items())]


def _compare(sides: Sequence[Side], lines: Sequence[Line], metric: str, rule: Rule, force: bool) -> Comparison:
    readings = {id(line): [_reading(line, side, metric) for side in range(len(sides))] for line in lines}
    shared = [line for line in lines if sum(reading is not None for reading in readings[id(line)]) > 1]
    unfair = _unfair(shared, metric)
    relative = metric == "speedup" or (bool(unfair) and not force)
    notes = [*_how(sides, metric, unfair, relative, force), *_other_differences(sides, shared)]
    bases: dict[str, None] = {}
    rows = []
    for line in shared:
        values, is_base = readings[id(line)], False
        if relative:
            base = _base(line, shared, readings)
            bases[base.label] = None
            is_base = base is line
            values = [
                None if mine is None or theirs is None else over(mine, theirs)
                for mine, theirs in zip(values, readings[id(base)], strict=True)
            ]
        decisions = [
            None if is_base or not side else _decide(values[0], values[side], rule) for side in range(len(sides))
        ]
        rows.append(Row(line, values, decisions, is_base))
    if relative:
        notes.insert(0, f"each side's {metric.replace('speedup', 'throughput')} is divided by its own {_listed(bases)}")
    units = {reading.unit for row in rows for reading in row.readings if reading is not None}
    return Comparison(shared[0].experiment, metric, " or ".join(sorted(units)), relative, rows,
                      [*notes, *_missing(sides, lines, readings)])  # fmt: skip


def _decide(base: Reading | None, head: Reading | None, rule: Rule) -> Decision | None:
    if base is None or head is None or base.unit != head.unit:
        return None
    try:
        return decide(base.measurement, head.measurement, rule)
    except ValueError:  # zeros have no ratios
        return None


def _reading(line: Line, side: int, metric: str) -> Reading | None:
    return read(line.entries[side], metric) if side in line.entries else None


def _shared(lines: Sequence[Line], metric: str) -> bool:
    """Say whether there is a line on which two sides say something of the metric."""
    return any(sum(read(entry, metric) is not None for entry in line.entries.values()) > 1 for line in lines)


def _base(line: Line, lines: Sequence[Line], readings: dict[int, list[Reading | None]]) -> Line:
    """Return the line to divide by: the one that the row's speed-up is over, where all sides say something of it."""
    have = [reading is not None for reading in readings[id(line)]]

    def complete(other: Line) -> bool:
        return all(there is not None for there, needed in zip(readings[id(other)], have, strict=True) if needed)

    result = line.first.result
    named = [other for other in lines if other.first.result.row == result.over]
    likely = [other for other in (*named, *lines) if other.first.result.scale == result.scale and complete(other)]
    return next(iter([*likely, *filter(complete, lines), line]))


# --- what a reader has to know ---------------------------------------------------------------------------------------


def machine(entry: Entry) -> object:
    """Return what has to be equal for absolute numbers to be compared."""
    run = entry.record.run
    if run is None:
        return entry.result.hardware or entry.record.hardware or entry.record.name
    each = run.machine
    return each.cpu, each.cores, each.memory and each.memory >> 30, [gpu.name for gpu in each.gpus], run.device, (
        run.threads_per_device
    )  # fmt: skip


def _unfair(lines: Sequence[Line], metric: str) -> list[str]:
    """Return why absolute numbers may not be compared. What takes no time does not depend on the machine."""
    pairs = [(first, other) for line in lines for first, *others in [line.entries.values()] for other in others]
    reasons = []
    if metric in TIMES and any(machine(first) != machine(other) for first, other in pairs):
        reasons.append("the sides ran on different machines")
    if not all(same_work(first, other) for first, other in pairs):
        reasons.append("matched rows did different work")
    return reasons


def _how(sides: Sequence[Side], metric: str, unfair: Sequence[str], relative: bool, force: bool) -> list[str]:
    if unfair and force and metric != "speedup":
        return [f"FORCED: absolute numbers are compared although {' and '.join(unfair)}"]
    return [f"absolute numbers are not compared: {' and '.join(unfair)}"] if unfair and relative else []


def _other_differences(sides: Sequence[Side], lines: Sequence[Line]) -> list[str]:
    """Tell which other circumstances of matched rows differ."""
    fields: dict[str, None] = {}
    versions: dict[str, dict[str, None]] = {}
    for line in lines:
        first, *others = line.entries.values()
        for other in others:
            fields.update(dict.fromkeys(differing(first, other)))
            if first.record.run is not None and other.record.run is not None:
                ours, theirs = first.record.run.versions, other.record.run.versions
                for name in ours:
                    if ours[name] != theirs.get(name):
                        versions.setdefault(name, {}).update({str(ours[name]): None, str(theirs.get(name)): None})
    notes = [f"matched rows also differ in: {', '.join(fields)}"] if fields else []
    return notes + [f"{name} differs: {' / '.join(found)}" for name, found in versions.items()]


def _missing(sides: Sequence[Side], lines: Sequence[Line], readings: dict[int, list[Reading | None]]) -> list[str]:
    """Tell which rows a side lacks, and which have no number, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        letters: dict[str, list[str]] = {}
        for number, side in enumerate(sides):
            if number not in line.entries:
                letters.setdefault("missing", []).append(side.letter)
            elif readings[id(line)][number] is None:
                result = line.entries[number].result
                why = result.reason if result.status == "needs devices" and result.reason else result.status
                known = why in ("measured", "published", "predicted")
                letters.setdefault("no number" if known else f"no number ({why})", []).append(side.letter)
        for what, where in letters.items():
            found.setdefault((what, " and ".join(where)), []).append(line.label)
    return [f"{what} in {where}: {_listed(labels)}" for (what, where), labels in found.items()]


def _nothing(sides: Sequence[Side], lines: Sequence[Line], metric: str | None) -> str:
    experiment = lines[0].experiment
    holders = [number for number in range(len(sides)) if any(number in line.entries for line in lines)]
    if metric is not None:
        return f"{experiment}: {metric} is not on two sides of any row"
    said = [
        f"{sides[number].letter} has "
        + (", ".join(available([line.entries[number] for line in lines if number in line.entries])) or "no number")
        for number in holders
    ]
    return f"{experiment}: no row has the same metric on two sides: {'; '.join(said)}"


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(labels))
