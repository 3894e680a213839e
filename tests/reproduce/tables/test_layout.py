"""Layout: tables fit 80 columns, Markdown keeps one line for each row, and numbers have three digits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reproduce.numbers.metrics import Reading
from reproduce.tables.layout import (
    WIDTH,
    Table,
    bullets,
    by_value,
    many,
    number,
    ratio,
    reading_text,
    span,
    with_quartiles,
)

TABLE = Table("Title " * 30, ("name", "a\nb"), [("x", "1\n2"), ("long name", "0.10")], notes=["note " * 40])


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (
            TABLE.text(),
            "name          a\n              b\n---------  ----\nx             1\n              2\nlong name  0.10",
        ),
        (TABLE.markdown(), "| name      |  a b |\n|:----------|-----:|\n| x         |  1 2 |\n| long name | 0.10 |"),
    ],
    ids=["text", "markdown"],
)
def test_a_table_is_laid_out(text: str, body: str) -> None:
    title, cells, notes = text.split("\n\n")
    assert title.removeprefix("## ").startswith("Title") and cells == body
    assert notes in (bullets(TABLE.notes), bullets(TABLE.notes, wrap=False))
    if not title.startswith("#"):
        assert all(len(line) <= WIDTH and line == line.rstrip() for line in text.splitlines())
        assert notes.splitlines()[1].startswith("  note")


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (number, 0.0, "0"),
        (number, 2.5e-5, "2.50e-05"),
        (number, 0.0042, "0.00420"),
        (number, 16.25, "16.2"),
        (number, 16.0, "16.0"),
        (number, 132.4, "132"),
        (number, 999.7, "1,000"),
        (number, 81505540.0, "81,505,540"),
        (number, Reading([1.0, 3.0, -0.5]), "1.00"),
        (ratio, 0.0042, "0.00420"),
        (ratio, Reading(0.853), "0.85"),
        (ratio, 0.104, "0.10"),
        (reading_text, Reading(16.25, "samples/s"), "16.2"),
        (reading_text, Reading(3 * 2**20, "bytes"), "3 MiB"),
        (reading_text, Reading(1024.0, "MiB"), "1.00 GiB"),
        (with_quartiles, Reading([1.0, 2.0, 3.0]), "2.00 (1.50-2.50)"),
        (with_quartiles, Reading([0.5]), "0.500"),
        (span, [8, 8], "8"),
        (span, [64, 8, 9], "8 to 64"),
        (lambda count: many(count, "row"), 1, "1 row"),
        (lambda count: many(count, "row"), 0, "0 rows"),
        (by_value, {"a": "x", "b": "y", "c": "x"}, {"x": "a, c", "y": "b"}),
    ],
)
def test_how_things_are_written(write: Callable[[object], object], value: object, text: object) -> None:
    assert write(value) == text
