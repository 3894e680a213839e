"""Format numbers and tables. A table can be written for a terminal of 80 columns or as Markdown."""

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
    """Format a number with three significant digits, or a large one as an integer.

    Examples are 0.850, 12.0 and 4,224. A reading (samples of a metric) is formatted as its median
    or mean. If other programs disturbed the measurement, an asterisk is added.
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
    """Format a ratio like `number`, but with two decimals between 0.1 and 1.

    So in a column, 0.85 has as many decimals as 1.25. The function `number` would write 0.850.
    """
    if isinstance(value, Reading):
        return ratio(value.middle) + value.mark
    if 0.1 <= abs(value) < 1:
        return f"{value:.2f}"
    return number(value)


def reading_text(reading: Reading) -> str:
    """Format a reading (samples of a metric) as its median or mean. Bytes become MiB or GiB."""
    if reading.unit not in BYTES:
        return number(reading)
    size = reading.middle * BYTES[reading.unit]
    if size >= GiB:
        return f"{size / GiB:.2f} GiB"
    return f"{size / MiB:.4g} MiB"


def with_quartiles(reading: Reading, write: Callable[[float], str] = number) -> str:
    """Format a reading (samples of a metric), and its quartiles if known: `12.0 (11.8-12.3)`."""
    text = write(reading.middle) + reading.mark
    quartiles = reading.quartiles
    if quartiles is None:
        return text
    low, high = map(write, quartiles)
    return f"{text} ({low}-{high})"


WIDTH = 80
DEVICES_PER_LINE = 4
WHOLE = {  # short form in a heading -> long form in Markdown
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
        value: A function that returns the value of a row.
        form: The format of a value: a format string, or a function that returns a text. Values that
            are strings are shown unchanged.
        nothing: The text that is shown if the value is None.
        left: Whether the column is aligned left, as columns of words are.
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
        """Return this column for a table whose rows are of another kind.

        Args:
            find: A function from a row of that table to a row for this column. If it returns None,
                the value is None.
        """

        def value(other: Other) -> object:
            row = find(other)
            return None if row is None else self.value(row)

        return Column(self.heading, value, self.form, self.nothing, self.left)


@dataclass(frozen=True)
class Table:
    """A table of texts. Only the form for a terminal keeps line breaks in headings and cells."""

    title: str
    headings: Cells
    rows: Sequence[Cells]
    notes: Notes = ()
    left: int = 1  # how many columns, from the first one on, are aligned left
    group: str = ""  # the name of the group of rows, if the experiment has several groups

    def text(self) -> str:
        """Return the table as text for a terminal."""
        title = textwrap.fill(self.title, WIDTH)
        cells = grid(self.headings, self.rows, "simple", self.left)
        parts = [title, "", cells]
        if self.notes:
            parts += ["", bullets(self.notes)]
        return "\n".join(parts)

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown, under a heading of the given level."""
        headings = [in_full(heading) for heading in self.headings]
        rows = [_without_breaks(row) for row in self.rows]
        title = "#" * level + " " + self.title
        body = grid(headings, rows, "pipe", self.left)
        return "\n".join([title, "", body, "", bullets(self.notes, wrap=False)])


def in_full(heading: str) -> str:
    """Return a heading in one line, with long words in place of the short ones for a terminal."""
    for short, long in WHOLE.items():
        heading = heading.replace(short, long)
    return heading.replace("\n", " ")


def _without_breaks(cells: Cells) -> Cells:
    return [cell.replace("\n", " ") for cell in cells]


def grid(head: Cells, rows: Sequence[Cells], style: str, left: int | None = None) -> str:
    """Format a heading and rows of cells in a style of the package tabulate.

    The first `left` columns are aligned left, and all other columns are aligned right. If `left` is
    None, all columns are aligned left.
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
    """Make a table. Columns that are empty in every row are left out, and also empty notes.

    If a cell has the mark of measurements that other programs disturbed, a note explains the mark.
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
    """Format a list of numbers, one for each device, with four numbers on a line."""
    texts = [form.format(each) for each in numbers]
    lines = []
    for start in range(0, len(texts), DEVICES_PER_LINE):
        end = start + DEVICES_PER_LINE
        lines.append(gap.join(texts[start:end]))
    return "\n".join(lines)


def bullets(notes: Notes, wrap: bool = True) -> str:
    """Return the notes as a list with bullets. Wrap lines for a terminal if `wrap` is true."""
    lines = []
    for note in notes:
        line = f"- {note}"
        if wrap:
            line = textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        lines.append(line)
    return "\n".join(lines)


def by_value(values: Mapping[str, str]) -> dict[str, str]:
    """Invert a dictionary: map each value to the names that have it, as a text such as `a, b`."""
    joined = {}
    for value, names in grouped(values, values.__getitem__).items():
        joined[value] = ", ".join(names)
    return joined


def many(count: int, thing: str) -> str:
    """Return a count and its noun, such as `1 row` or `2 rows`."""
    if count == 1:
        return f"1 {thing}"
    return f"{count} {thing}s"


def span(values: Sequence[float]) -> str:
    """Return `8` if all values are 8, and `8 to 64` if they range from 8 to 64."""
    low = min(values)
    high = max(values)
    if low == high:
        return str(low)
    return f"{low} to {high}"
