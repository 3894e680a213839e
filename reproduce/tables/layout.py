"""Lay tables out for a terminal of 80 columns and for Markdown."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import tabulate

WIDTH = 80
DEVICES_PER_LINE = 4
WHOLE = {"publ.": "published", "-\n": "-", "/\n": "/"}  # where there is room for it
tabulate.MIN_PADDING = 0  # or each column is two wider than its heading
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """Describe a column: its heading, and what it says of a row, None for nothing. Words stand on the `left`."""

    heading: str
    cell: Callable[[Row], object]
    left: bool = False


@dataclass(frozen=True)
class Table:
    """Hold a table's cells as text. A line break in a heading or a cell is kept on a terminal only."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    left: int = 1  # how many columns, from the first, are words and stand on the left
    group: str = ""  # the name of the rows' group, where an experiment has several

    def text(self) -> str:
        """Return the table for a terminal."""
        body = self._tabulate(self.rows, self.headings, "simple")
        notes = ["", bullets(self.notes)] if self.notes else []
        return "\n".join([textwrap.fill(self.title, WIDTH), "", body, *notes])

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown, under a heading of that level."""
        headings = [
            functools.reduce(lambda text, word: text.replace(*word), WHOLE.items(), each) for each in self.headings
        ]
        flat = [[cell.replace("\n", " ") for cell in row] for row in (headings, *self.rows)]
        body = self._tabulate(flat[1:], flat[0], "pipe")
        return "\n".join([f"{'#' * level} {self.title}", "", body, "", bullets(self.notes, wrap=False)])

    def _tabulate(self, rows: Sequence[Sequence[str]], headings: Sequence[str], style: str) -> str:
        align = ["left" if i < self.left else "right" for i in range(len(headings))]
        text = tabulate.tabulate(
            rows, headings, tablefmt=style, colalign=align, headersglobalalign=None, disable_numparse=True
        )
        return "\n".join(line.rstrip() for line in text.splitlines())


def table(title: str, columns: Iterable[Column[Row]], rows: Iterable[Row], notes: Iterable[str | None] = ()) -> Table:
    """Make the table of some rows. Columns that are empty in every row are left out, and so are notes of nothing."""
    rows = list(rows)
    texts = {column: ["" if (cell := column.cell(row)) is None else str(cell) for row in rows] for column in columns}
    kept = [column for column in texts if any(texts[column])]
    lines = list(zip(*(texts[column] for column in kept), strict=True))
    left = sum(column.left for column in kept)
    return Table(title, [column.heading for column in kept], lines, list(filter(None, notes)), left)


def in_lines(numbers: Sequence[str]) -> str:
    """Return a number for each device, four to a line."""
    lines = [numbers[i : i + DEVICES_PER_LINE] for i in range(0, len(numbers), DEVICES_PER_LINE)]
    return "\n".join("  ".join(line) for line in lines)


def bullets(notes: Sequence[str], wrap: bool = True) -> str:
    """Return the notes as a list, wrapped for a terminal or not."""
    if not wrap:
        return "\n".join(f"- {note}" for note in notes)
    return "\n".join(textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in notes)


def by_value(values: Mapping[str, str]) -> dict[str, str]:
    """Return for each value the names that have it, as in `a, b`."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return {value: ", ".join(those) for value, those in names.items()}


def many(count: int, thing: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def span(values: Sequence[float]) -> str:
    """Return `8` where all values are 8, and `8 to 64` where they differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
