"""Arrange a comparison as a grid of ratios: some fields of the configuration down, others across."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.error import USAGE, Error
from reproduce.numbers.judge import Comparison, Row, verdict
from reproduce.numbers.match import value
from reproduce.numbers.significance import Decision
from reproduce.numbers.sources import Side
from reproduce.tables.layout import Table
from reproduce.tables.pick import shown

__all__ = ["pivot"]

MARKS = {"better": "+", "worse": "-", "differs": "!", "~": "~", "too few": "?", "untested": ""}
LEGEND = "+ better, - worse, ! differs, ~ no real difference, ? too few samples, no mark: numbers without samples"


def pivot(comparison: Comparison, sides: Sequence[Side], down: Sequence[str], across: Sequence[str]) -> list[Table]:
    """Return a grid for every side but the first. Rows that lack one of the fields are left out.

    Raises:
        Error: two rows would share a cell; the message names fields that tell them apart.
    """
    cells: dict[tuple[str, str], Row] = {}
    for row in comparison.rows:
        at = _place(row, down), _place(row, across)
        if "-" in (*at[0].split("\n"), *at[1].split("\n")):
            continue
        other = cells.setdefault(at, row)
        if other is not row:
            raise Error(_clash(row, other, at), USAGE)
    lines = sorted(dict.fromkeys(line for line, _ in cells), key=_order)
    columns = sorted(dict.fromkeys(column for _, column in cells), key=_order)
    tables = []
    for number in range(1, len(sides)):
        rows = []
        for line in lines:
            found = [cells.get((line, column)) for column in columns]
            rows.append([line.replace("\n", " "), *(_cell(row, number, comparison.metric) for row in found)])
        metric = f"{comparison.metric}, each side over its own" if comparison.relative else comparison.metric
        title = f"{comparison.experiment}: {metric}, {sides[number].letter}/{sides[0].letter}"
        headings = [f"{' '.join(down)} \\ {' '.join(across)}", *(column.replace("\n", " ") for column in columns)]
        tables.append(Table(title, headings, rows, [LEGEND, *comparison.notes]))
    return tables if cells else []


def _place(row: Row, fields: Sequence[str]) -> str:
    return "\n".join(shown(value(row.line, name)) for name in fields)


def _cell(row: Row | None, side: int, metric: str) -> str:
    decision: Decision | None = None if row is None else row.decisions[side]
    if decision is None:
        return "1" if row is not None and row.base else ""
    return f"{decision.ratio:.2f} {MARKS[verdict(decision, metric)]}".rstrip()


def _order(text: str) -> list[tuple[float, str]]:
    """Sort numbers as numbers."""
    return [
        (float(part), "") if part.replace(".", "", 1).isdigit() else (float("inf"), part) for part in text.split("\n")
    ]


def _clash(one: Row, other: Row, at: tuple[str, str]) -> str:
    ours, theirs = one.line.first.result, other.line.first.result
    apart = [name for name in ours.config if ours.config.get(name) != theirs.config.get(name)]
    return (
        f"--row, --col: {other.line.label!r} and {one.line.label!r} are both at {' x '.join(at)}; "
        f"name another field, such as {', '.join(apart[:3]) or 'row'}, or use --filter"
    ).replace("\n", " ")
