"""Format numbers, and tables for a terminal of 80 columns and for Markdown."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Generic, TypeVar

import tabulate

from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import BYTES, DISTURBED, MARK, Reading

MiB, GiB = BYTES["MiB"], BYTES["GiB"]


def number(value: float | Reading) -> str:
    """Format a number, or a reading's middle, with three significant digits or as an integer: 0.850, 12.0, 4,224.

    A reading that was disturbed has a mark.
    """
    if isinstance(value, Reading):
        return number(value.middle) + MARK * value.disturbed
    if 999.5 <= abs(value) < 1e13:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e13:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.2e}" if value else "0"


def ratio(value: float | Reading) -> str:
    """Format a ratio as a number, but from 0.1 to 1 with two decimals, to fit in a column with 1.25: 0.85."""
    if isinstance(value, Reading):
        return ratio(value.middle) + MARK * value.disturbed
    return f"{value:.2f}" if 0.1 <= abs(value) < 1 else number(value)


def reading_text(reading: Reading) -> str:
    """Format a reading's middle; bytes in MiB or GiB."""
    if reading.unit not in BYTES:
        return number(reading)
    value = reading.middle * BYTES[reading.unit]
    return f"{value / GiB:.2f} GiB" if value >= GiB else f"{value / MiB:.4g} MiB"


def with_quartiles(reading: Reading, write: Callable[[float], str] = number) -> str:
    """Format a reading's middle and its quartiles, if any, as in `12.0 (11.8-12.3)`."""
    between = "" if reading.quartiles is None else f" ({'-'.join(map(write, reading.quartiles))})"
    return write(reading.middle) + MARK * reading.disturbed + between


WIDTH = 80
DEVICES_PER_LINE = 4
WHOLE = {
    "publ.": "published",
    "-\n": "-",
    "/\n": "/",
}  # short form in a heading, long form in Markdown
tabulate.MIN_PADDING = 0  # else a column is two characters wider than its heading
Row = TypeVar("Row")
Other = TypeVar("Other")
Form = str | Callable[[Any], str]


@dataclass(frozen=True)
class Column(Generic[Row]):
    """Describe a column: its heading, a function from a row to its value, and the value's format.

    A string is shown as it is, None as `nothing`. Columns of words are aligned `left`.
    """

    heading: str
    value: Callable[[Row], object]
    form: Form = "{}"
    nothing: str = ""
    left: bool = False

    def text(self, row: Row) -> str:
        """Return the cell of a row."""
        value = self.value(row)
        if value is None or isinstance(value, str):
            return self.nothing if value is None else value
        return self.form.format(value) if isinstance(self.form, str) else self.form(value)

    def of(self, find: Callable[[Other], Row | None]) -> "Column[Other]":
        """Return this column for another table: `find` maps its rows to rows of this column, or to None."""

        def value(other: Other) -> object:
            row = find(other)
            return None if row is None else self.value(row)

        return Column(self.heading, value, self.form, self.nothing, self.left)


@dataclass(frozen=True)
class Table:
    """Hold a table's cells as text. Line breaks in headings and cells are only for the terminal."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    left: int = 1  # number of first columns that are aligned left
    group: str = ""  # the name of the rows' group, where an experiment has several

    def text(self) -> str:
        """Return the table for a terminal."""
        notes = ["", bullets(self.notes)] if self.notes else []
        cells = grid(self.headings, self.rows, "simple", self.left)
        return "\n".join([textwrap.fill(self.title, WIDTH), "", cells, *notes])

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown, under a heading of that level."""
        headings = [
            reduce(lambda text, word: text.replace(*word), WHOLE.items(), each)
            for each in self.headings
        ]
        flat = [[cell.replace("\n", " ") for cell in row] for row in (headings, *self.rows)]
        body = grid(flat[0], flat[1:], "pipe", self.left)
        return "\n".join(
            [f"{'#' * level} {self.title}", "", body, "", bullets(self.notes, wrap=False)]
        )


def grid(
    head: Sequence[str], rows: Sequence[Sequence[str]], style: str, left: int | None = None
) -> str:
    """Format rows in a style of tabulate. The first `left` columns are aligned left, the others right."""
    align = (
        ["left"] * len(head) if left is None else ["left"] * left + ["right"] * (len(head) - left)
    )
    text = tabulate.tabulate(
        rows, head, tablefmt=style, colalign=align, headersglobalalign=None, disable_numparse=True
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def table(
    title: str,
    columns: Iterable[Column[Row]],
    rows: Iterable[Row],
    notes: Iterable[str | None] = (),
) -> Table:
    """Make a table. Columns that are empty in every row are left out, and so are empty notes; a mark is explained."""
    rows = list(rows)
    texts = [(column, [column.text(row) for row in rows]) for column in columns]
    kept = [(column, cells) for column, cells in texts if any(cells)]
    lines = list(zip(*(cells for _, cells in kept), strict=True))
    headings, left = [column.heading for column, _ in kept], sum(column.left for column, _ in kept)
    marked = [DISTURBED] if any(MARK in cell for line in lines for cell in line) else []
    return Table(title, headings, lines, [*filter(None, notes), *marked], left)


def in_lines(numbers: Sequence[float], form: str, gap: str = "  ") -> str:
    """Format a number for each device, four to a line."""
    texts = [form.format(each) for each in numbers]
    lines = [texts[i : i + DEVICES_PER_LINE] for i in range(0, len(texts), DEVICES_PER_LINE)]
    return "\n".join(gap.join(line) for line in lines)


def bullets(notes: Sequence[str], wrap: bool = True) -> str:
    """Return the notes as a list, wrapped for a terminal or not."""
    if not wrap:
        return "\n".join(f"- {note}" for note in notes)
    return "\n".join(
        textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in notes
    )


def by_value(values: Mapping[str, str]) -> dict[str, str]:
    """Group names by value: return the names that have each value, joined as in `a, b`."""
    return {value: ", ".join(names) for value, names in grouped(values, values.__getitem__).items()}


def many(count: int, thing: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def span(values: Sequence[float]) -> str:
    """Return `8` where all values are 8, and `8 to 64` where they differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
