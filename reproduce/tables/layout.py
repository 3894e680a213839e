"""Lay tables out for a terminal of 80 columns and for Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import tabulate

__all__ = ["WIDTH", "Table", "bullets", "failures", "in_lines", "many", "span"]

WIDTH = 80
DEVICES_PER_LINE = 4
tabulate.MIN_PADDING = 0  # or each column is two wider than its heading


@dataclass(frozen=True)
class Table:
    """Hold a table's cells as text. A line break in a heading or a cell is kept on a terminal only."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    left: int = 1  # how many columns, from the first, are words and stand on the left

    def text(self) -> str:
        """Return the table for a terminal."""
        body = self._tabulate(self.rows, self.headings, "simple")
        notes = ["", bullets(self.notes)] if self.notes else []
        return "\n".join([textwrap.fill(self.title, WIDTH), "", body, *notes])

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown, under a heading of that level."""
        headings = [heading.replace("publ.", "published") for heading in self.headings]  # there is room
        flat = [[cell.replace("\n", " ") for cell in row] for row in (headings, *self.rows)]
        body = self._tabulate(flat[1:], flat[0], "pipe")
        return "\n".join([f"{'#' * level} {self.title}", "", body, "", *(f"- {note}" for note in self.notes)])

    def _tabulate(self, rows: Sequence[Sequence[str]], headings: Sequence[str], style: str) -> str:
        align = ["left" if i < self.left else "right" for i in range(len(headings))]
        text = tabulate.tabulate(
            rows, headings, tablefmt=style, colalign=align, headersglobalalign=None, disable_numparse=True
        )
        return "\n".join(line.rstrip() for line in text.splitlines())


def in_lines(numbers: Sequence[str]) -> str:
    """Return a number for each device, four to a line."""
    lines = [numbers[i : i + DEVICES_PER_LINE] for i in range(0, len(numbers), DEVICES_PER_LINE)]
    return "\n".join("  ".join(line) for line in lines)


def bullets(notes: Sequence[str], wrap: bool = True) -> str:
    """Return the notes as a list, wrapped for a terminal or not."""
    if not wrap:
        return "\n".join(f"- {note}" for note in notes)
    return "\n".join(textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in notes)


def failures(failed: Sequence[tuple[str, str]]) -> list[str]:
    """Return a note for each reason why rows failed, given pairs of row and reason."""
    reasons = dict.fromkeys(reason for _, reason in failed)
    return [f"failed: {', '.join(row for row, why in failed if why == reason)}: {reason}" for reason in reasons]


def many(count: int, thing: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def span(values: Sequence[float]) -> str:
    """Return `8` where all values are 8, and `8 to 64` where they differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
