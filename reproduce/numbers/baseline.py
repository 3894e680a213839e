"""Choose the baseline row of a comparison, and find out whether the baseline itself has changed.

A row is a measured configuration. The numbers of all other rows are divided by the numbers of the
baseline row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reproduce.numbers.match import Line
from reproduce.numbers.metrics import Reading
from reproduce.numbers.significance import Decision, Rule, compare_samples

Readings = Mapping[int, Reading]  # maps a side's number to its value (a reading) in one row
Measured = tuple[Line, Readings]
CHANGED = ("higher", "lower")  # the outcomes of a real difference


def baseline(line: Line, own: Readings, bases: Sequence[Measured]) -> Measured:
    """Choose the baseline for one line of a comparison's table.

    A line of the table has the matching rows (configurations) of the compared sides, such as runs.
    The numbers of the line will be divided by the numbers of the baseline, which is also a line.
    Each side that has a value in the line must also have a value in the baseline. If several
    baselines are possible, these questions decide, one after another:

    1. Which baseline was run like the line: measured or emulated, and by the same engine?
    2. Which baseline has the same scale (set of sizes) as the line?
    3. Which baseline is the row that the line's field `over` names?
    4. Which baseline is first in `bases`?

    Args:
        line: The line whose numbers will be divided.
        own: The line's value on each side.
        bases: The lines that can be the baseline, each with its value on each side.
    """
    ours = line.first.result

    def likeness(base: Measured) -> tuple[bool, ...]:
        theirs = base[0].first.result
        same_kind = theirs.emulated == ours.emulated and theirs.engine == ours.engine
        return same_kind, theirs.scale == ours.scale, theirs.row == ours.over

    possible = [base for base in bases if own.keys() <= base[1].keys()]
    return max(possible, key=likeness)


def differing_baseline(
    base: Measured, side: int, rows: Sequence[Decision | None], rule: Rule
) -> Decision | None:
    """Return how the baseline's own numbers differ between two sides, or None if they do not.

    If only the baseline became slower, all rows that are divided by it would look faster. So the
    baseline counts as changed if its absolute numbers differ. There is one exception: if most rows
    kept their ratio to the baseline, the whole machine has become slower or faster, and the
    baseline counts as unchanged.

    The baseline of a published or predicted table counts as unchanged.

    Args:
        base: The baseline, and its values on each side.
        side: The index of the side that is compared with the first side.
        rows: For each row whose numbers are divided by those of the baseline, the result of
            comparing this ratio between the two sides.
        rule: What counts as a difference.
    """
    line, readings = base
    for each in (0, side):
        if each not in readings or line.entries[each].record.run is None:
            return None
    itself = decide(readings[0], readings[side], rule)
    if itself is None or itself.outcome not in CHANGED:
        return None
    outcomes = [decision.outcome for decision in rows if decision is not None]
    changed = sum(outcome in CHANGED for outcome in outcomes)
    kept = outcomes.count("~")
    return None if changed < kept or not changed else itself


def decide(base: Reading | None, head: Reading | None, rule: Rule) -> Decision | None:
    """Compare the value `head` with the value `base`; return whether they differ, and their ratio.

    Return None if the two values have no ratio: if one of them is missing or not positive, or if
    their units differ. `rule` says which differences count.
    """
    if base is None or head is None or base.unit != head.unit:
        return None
    try:
        found = compare_samples(base.measurement, head.measurement, rule)
    except ValueError:  # zeros have no ratios
        if any(base.listed) or any(head.listed):
            return None
        found = Decision("~", 1.0)  # but two zeros are equal
    if base.disturbed or head.disturbed:
        return replace(found, outcome="disturbed")
    return found
