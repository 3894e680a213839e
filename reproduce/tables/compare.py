"""Answer what `python -m reproduce compare` was asked: load, match, pick, compare, write."""

from __future__ import annotations

import string
from collections.abc import Sequence

from reproduce.error import USAGE, Error
from reproduce.numbers.compare import Comparison, compare
from reproduce.numbers.match import match, pick, values_of
from reproduce.numbers.metrics import available
from reproduce.numbers.significance import Rule
from reproduce.numbers.sources import load_side
from reproduce.tables.comparison import write_comparisons
from reproduce.tables.layout import many
from reproduce.tables.pivot import pivot


def compared(
    names: Sequence[str],
    *,
    metric: str | None = None,
    filters: Sequence[str] = (),
    down: Sequence[str] = (),
    across: Sequence[str] = (),
    alpha: float = Rule.alpha,
    threshold: float = Rule.threshold,
    style: str = "text",
    force: bool = False,
) -> tuple[str, str | None]:
    """Return the comparison as text, and why it does not pass as free of regressions, None where it does.

    `down` and `across` name the fields of a grid, where one is wanted; the others are the command's options.

    Raises:
        Error: a side cannot be found or is broken, or there is no such metric, field or row.
    """
    rule = Rule(alpha, threshold)
    sides = [load_side(letter, name) for letter, name in zip(string.ascii_uppercase, names, strict=False)]
    lines = pick(match(sides), filters)
    metrics = available([entry for line in lines for entry in line.entries.values()])
    if metric is not None and metric not in metrics:
        raise Error(f"--metric {metric}: no row has it; there are {', '.join(metrics) or 'none'}", USAGE)
    for option, fields in (("--row", down), ("--col", across)):
        for field in fields:
            values_of(field, lines, f"{option} {field}")
    comparisons, notes = compare(sides, lines, metric=metric, rule=rule, force=force)
    grids = [grid for each in comparisons for grid in pivot(each, sides, down, across)] if down else None
    return write_comparisons(comparisons, sides, rule, notes, style, grids), _complaint(comparisons)


def _complaint(comparisons: Sequence[Comparison]) -> str | None:
    """Say which rows are worse, or that nothing is certain: a gate that compares nothing must not stand open."""
    verdicts = [
        (f"{row.line.label} ({comparison.experiment})", verdict)
        for comparison in comparisons
        for row, verdict in comparison.verdicts()
    ]
    worse = dict.fromkeys(row for row, verdict in verdicts if verdict == "worse")
    if worse:
        return f"{many(len(worse), 'row')} worse than in A: {', '.join(worse)}"
    if all(verdict in ("too few", "untested") for _, verdict in verdicts):
        return "no row could be decided, so nothing shows that there is no regression"
    return None
