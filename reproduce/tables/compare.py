"""Answer what `python -m reproduce compare` was asked: load, match, pick, judge, render."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from reproduce.error import USAGE, Error
from reproduce.numbers.judge import Comparison, compare, verdict
from reproduce.numbers.match import Line, match
from reproduce.numbers.metric import available
from reproduce.numbers.significance import Rule
from reproduce.numbers.sources import load_side
from reproduce.tables.comparison import as_csv, as_json, legend, table
from reproduce.tables.layout import bullets, many
from reproduce.tables.pick import parse_filters, pick, values_of
from reproduce.tables.pivot import pivot

__all__ = ["Question", "answer"]


@dataclass(frozen=True)
class Question:
    """Hold what is asked for, as the command's options have it; `rows` and `columns` are a grid's fields."""

    metric: str | None = None
    filters: Sequence[str] = ()
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    alpha: float = Rule.alpha
    threshold: float = Rule.threshold
    style: str = "text"
    force: bool = False


def answer(names: Sequence[str], question: Question) -> tuple[str, str | None]:
    """Return the comparison as text, and why it does not pass as free of regressions, None where it does.

    Raises:
        Error: a side cannot be found or is broken, or there is no such metric, field or row.
    """
    rule = Rule(question.alpha, question.threshold)
    wanted = parse_filters(question.filters)
    sides = [load_side(letter, name) for letter, name in zip(string.ascii_uppercase, names, strict=False)]
    lines = pick(match(sides), wanted)
    _check_metric(question.metric, lines)
    for option, names_of in (("--row", question.rows), ("--col", question.columns)):
        for name in names_of or ():
            values_of(name, lines, f"{option} {name}")
    comparisons, notes = compare(sides, lines, metric=question.metric, rule=rule, force=question.force)
    complaint = _complaint(comparisons)
    if question.style == "csv":
        return as_csv(comparisons, sides), complaint
    if question.style == "json":
        return as_json(comparisons, sides, notes, rule), complaint

    if question.rows is None or question.columns is None:
        tables = [table(each, sides) for each in comparisons]
    else:
        tables = [grid for each in comparisons for grid in pivot(each, sides, question.rows, question.columns)]
    terminal = question.style == "text"
    parts = [(each.text() if terminal else each.markdown()).rstrip() for each in tables]
    if not parts:
        parts = ["no row has numbers on two sides" if question.rows is None else "no row has all of the grid's fields"]
    return "\n\n".join([*parts, bullets([*legend(sides, rule), *notes], wrap=terminal)]) + "\n", complaint


def _check_metric(metric: str | None, lines: Sequence[Line]) -> None:
    names = available([entry for line in lines for entry in line.entries.values()])
    if metric is not None and metric not in names:
        raise Error(f"--metric {metric}: no row has it; there are {', '.join(names) or 'none'}", USAGE)


def _complaint(comparisons: Sequence[Comparison]) -> str | None:
    """Say which rows are worse, or that none was decided: a gate that compares nothing must not stand open."""
    worse = [
        f"{row.line.label} ({comparison.experiment})"
        for comparison in comparisons
        for row in comparison.rows
        if any(each is not None and verdict(each, comparison.metric) == "worse" for each in row.decisions)
    ]
    if worse:
        return f"{many(len(worse), 'row')} worse than in A: {', '.join(worse)}"
    if all(said in ("too few", "untested") for comparison in comparisons for said in comparison.verdicts()):
        return "no row could be decided, so nothing shows that there is no regression"
    return None
