"""Arrange a comparison as a grid of ratios: some configuration fields as rows, others as columns."""

from collections.abc import Sequence

from reproduce.error import USAGE, Error
from reproduce.numbers.compare import ComparedRow, Comparison, verdict
from reproduce.numbers.match import value_text
from reproduce.numbers.sources import Side
from reproduce.tables.layout import Table

MARKS = {"better": "+", "worse": "-", "differs": "!", "~": "~", "too few": "?", "untested": ""}
LEGEND = "+ better, - worse, ! differs, ~ no real difference, ? too few samples, no mark: numbers without samples"
Place = tuple[str, ...]  # the values of the fields


def pivot(comparison: Comparison, sides: Sequence[Side], down: Sequence[str], across: Sequence[str]) -> list[Table]:
    """Return a grid for every side but the first. Rows without one of the fields are left out.

    Raises:
        Error: two rows have the same cell; the message names fields that distinguish them.
    """
    grid: dict[tuple[Place, Place], ComparedRow] = {}
    for row in comparison.rows:
        at = _place(row, down), _place(row, across)
        if "-" not in (*at[0], *at[1]) and grid.setdefault(at, row) is not row:
            raise Error(_clash(row, grid[at], at), USAGE)
    if not grid:
        return []
    lines, columns = (sorted(set(places), key=_order) for places in zip(*grid, strict=True))

    def text(at: tuple[Place, Place], side: int) -> str:
        row = grid.get(at)
        decision = None if row is None else row.decisions[side]
        if decision is None:
            return "1" if row is not None and row.base else ""
        return f"{decision.ratio:.2f} {MARKS[verdict(decision, comparison.metric)]}".rstrip()

    return [
        Table(
            f"{comparison.experiment}: {comparison.what}, {side.letter}/{sides[0].letter}",
            [f"{' '.join(down)} \\ {' '.join(across)}", *map(" ".join, columns)],
            [[" ".join(line), *(text((line, column), number) for column in columns)] for line in lines],
            [LEGEND, *comparison.notes],
        )
        for number, side in enumerate(sides[1:], 1)
    ]


def _place(row: ComparedRow, fields: Sequence[str]) -> Place:
    return tuple(value_text(row.line, name) for name in fields)


def _order(place: Place) -> list[tuple[float, str]]:
    """Return a sort key that sorts numbers by value, before words."""
    return [(float(part), "") if part.replace(".", "", 1).isdigit() else (float("inf"), part) for part in place]


def _clash(one: ComparedRow, other: ComparedRow, at: tuple[Place, Place]) -> str:
    ours, theirs = one.line.first.result.config, other.line.first.result.config
    apart = [name for name in ours if ours.get(name) != theirs.get(name)]
    return (
        f"--row, --col: {other.line.label!r} and {one.line.label!r} are both at {' x '.join(map(' '.join, at))}; "
        f"name another field, such as {', '.join(apart[:3]) or 'row'}, or use --filter"
    )
