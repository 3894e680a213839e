"""Format numbers as text, and tables as text for a terminal of 80 columns or as Markdown."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import tabulate

from reproduce.numbers.match import grouped
from reproduce.numbers.metrics import BYTES, DISTURBED, MARK, Reading

MiB = BYTES["MiB"]
GiB = BYTES["GiB"]


def number(value: float | Reading) -> str:
    """Format a number with three significant digits, or a large number as an integer.

    Examples are 0.850, 12.0 and 4,224. For a reading (the samples of a metric), its median or mean
    is formatted. If other programs disturbed the measurement, an asterisk is added.
    """
    if isinstance(value, Reading):
        return number(value.middle) + value.mark
    size = abs(value)
    if 999.5 <= size < 1e13:
        return f"{value:,.0f}"
    if 1e-3 <= size < 1e13:
        return f"{value:#.3g}".rstrip(".")
    if value:
        return f"{value:.2e}"
    return "0"


def ratio(value: float | Reading) -> str:
    """Format a ratio like the function `number`, but with only two decimals between 0.1 and 1.

    So 0.85 has as many decimals as 1.25 in the same column. `number` would write 0.850.
    """
    if isinstance(value, Reading):
        return ratio(value.middle) + value.mark
    if 0.1 <= abs(value) < 1:
        return f"{value:.2f}"
    return number(value)


def reading_text(reading: Reading) -> str:
    """Format the median or mean of a reading (samples of a metric), with bytes as MiB or GiB."""
    if reading.unit not in BYTES:
        return number(reading)
    size = reading.middle * BYTES[reading.unit]
    if size >= GiB:
        return f"{size / GiB:.2f} GiB"
    return f"{size / MiB:.4g} MiB"


def with_quartiles(reading: Reading, write: Callable[[float], str] = number) -> str:
    """Format a reading (the samples of a metric) as `12.0 (11.8-12.3)`: median and quartiles.

    If the quartiles are not known, leave them out. The function `write` formats each number.
    """
    text = write(reading.middle) + reading.mark
    quartiles = reading.quartiles
    if quartiles is None:
        return text
    low, high = map(write, quartiles)
    return f"{text} ({low}-{high})"


WIDTH = 80
DEVICES_PER_LINE = 4
WHOLE = {  # maps parts of headings to their long forms for Markdown
    "publ.": "published",
    "-\n": "-",
    "/\n": "/",
}
tabulate.MIN_PADDING = 0  # By default, a column is two characters wider than its heading.
Row = TypeVar("Row")
Other = TypeVar("Other")
Form = str | Callable[[Any], str]
Cells = Sequence[str]
Notes = Sequence[str]


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        heading: The heading of the column.
        value: A function that takes a row and returns the value that the column shows for it.
        form: How a value is formatted: a format string, or a function that returns a text. A value
            that is a string is shown unchanged.
        nothing: The text that is shown if the value is None.
        left: Whether the column is aligned left, like columns of words.
    """

    heading: str
    value: Callable[[Row], object]
    form: Form = "{}"
    nothing: str = ""
    left: bool = False

    def text(self, row: Row) -> str:
        """Return the cell of a row."""
        value = self.value(row)
        form = self.form
        if value is None:
            return self.nothing
        if isinstance(value, str):
            return value
        if isinstance(form, str):
            return form.format(value)
        return form(value)

    def of(self, find: Callable[[Other], Row | None]) -> "Column[Other]":
        """Return a copy of this column for a table whose rows are objects of another type.

        Args:
            find: A function that takes a row of that table, and returns the row for which this
                column shows a value. If the function returns None, the value is None.
        """

        def value(other: Other) -> object:
            row = find(other)
            return None if row is None else self.value(row)

        return Column(self.heading, value, self.form, self.nothing, self.left)


@dataclass(frozen=True)
class Table:
    """A table of texts, which can be written for a terminal or as Markdown.

    Attributes:
        title: The title of the table.
        headings: The headings of the columns.
        rows: The cells of each row. The Markdown form has no line breaks in cells and headings.
        notes: The notes below the table.
        left: How many columns, from the first one on, are aligned left.
        group: The name of the group of rows, if the experiment has several groups.
    """

    title: str
    headings: Cells
    rows: Sequence[Cells]
    notes: Notes = ()
    left: int = 1
    group: str = ""

    def text(self) -> str:
        """Return the table as text for a terminal, with its title and its notes."""
        title = textwrap.fill(self.title, WIDTH)
        cells = grid(self.headings, self.rows, "simple", self.left)
        parts = [title, "", cells]
        if self.notes:
            parts += ["", bullets(self.notes)]
        return "\n".join(parts)

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown. Its title is a heading of the given level."""
        headings = [in_full(heading) for heading in self.headings]
        rows = [_without_breaks(row) for row in self.rows]
        title = "#" * level + " " + self.title
        body = grid(headings, rows, "pipe", self.left)
        return "\n".join([title, "", body, "", bullets(self.notes, wrap=False)])


def in_full(heading: str) -> str:
    """Return the heading of a column for Markdown, which has more room than a terminal.

    The heading has one line, and whole words instead of abbreviations.
    """
    for short, long in WHOLE.items():
        heading = heading.replace(short, long)
    return heading.replace("\n", " ")


def _without_breaks(cells: Cells) -> Cells:
    return [cell.replace("\n", " ") for cell in cells]


def grid(head: Cells, rows: Sequence[Cells], style: str, left: int | None = None) -> str:
    """Format the headings and the rows of a table with the package tabulate.

    Args:
        head: The headings of the columns.
        rows: The cells of each row.
        style: The name of tabulate's style, such as "simple" or "pipe".
        left: How many columns, from the first one on, are aligned left. The others are aligned
            right. If None, all columns are aligned left.
    """
    if left is None:
        left = len(head)
    right = len(head) - left
    text = tabulate.tabulate(
        rows,
        head,
        tablefmt=style,
        colalign=["left"] * left + ["right"] * right,
        headersglobalalign=None,
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def table(
    title: str,
    columns: Iterable[Column[Row]],
    rows: Iterable[Row],
    notes: Iterable[str | None] = (),
) -> Table:
    """Make a table, without the columns whose cells are all empty, and without empty notes.

    If a cell has the mark of a measurement that other programs disturbed, a note explains the mark.

    Args:
        title: The title of the table.
        columns: The columns, which say how each row is shown.
        rows: The rows, such as the results of an experiment.
        notes: The notes below the table.
    """
    rows = list(rows)
    headings = []
    left = 0
    cells_of_columns = []
    kept_notes = list(filter(None, notes))
    marked = False
    for column in columns:
        cells = [column.text(row) for row in rows]
        if not any(cells):
            continue
        headings.append(column.heading)
        cells_of_columns.append(cells)
        if column.left:
            left += 1
        if any(MARK in cell for cell in cells):
            marked = True
    if marked:
        kept_notes.append(DISTURBED)
    lines = list(zip(*cells_of_columns, strict=True))
    return Table(title, headings, lines, kept_notes, left)


def in_lines(numbers: Sequence[float], form: str, gap: str = "  ") -> str:
    """Format a list of numbers, such as one for each device, with at most four in a line."""
    texts = [form.format(each) for each in numbers]
    lines = []
    for start in range(0, len(texts), DEVICES_PER_LINE):
        end = start + DEVICES_PER_LINE
        lines.append(gap.join(texts[start:end]))
    return "\n".join(lines)


def bullets(notes: Notes, wrap: bool = True) -> str:
    """Return notes as a list with bullets. If `wrap` is true, wrap long lines for a terminal."""
    lines = []
    for note in notes:
        line = f"- {note}"
        if wrap:
            line = textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        lines.append(line)
    return "\n".join(lines)


def by_value(values: Mapping[str, str]) -> dict[str, str]:
    """Invert a dictionary from names to values, for a text that lists names with equal values.

    In the result, the keys are the values. Each value is mapped to the text of the names that have
    this value, such as `a, b`.
    """
    joined = {}
    for value, names in grouped(values, values.__getitem__).items():
        joined[value] = ", ".join(names)
    return joined


def many(count: int, thing: str) -> str:
    """Return a number and a noun, in the singular or the plural: `1 row` or `2 rows`."""
    if count == 1:
        return f"1 {thing}"
    return f"{count} {thing}s"


def span(values: Sequence[float]) -> str:
    """Return the range of some values as a text: `8 to 64`, or `8` if all values are 8."""
    low = min(values)
    high = max(values)
    if low == high:
        return str(low)
    return f"{low} to {high}"
