"""Layout: tables fit 80 columns, and Markdown keeps one line for each row."""

from __future__ import annotations

import pytest

from reproduce.tables.layout import WIDTH, Table, bullets, failures, many, span

TABLE = Table("Title " * 30, ("name", "a\nb"), [("x", "1\n2"), ("long name", "0.10")], notes=["note " * 40])


def test_text() -> None:
    lines = TABLE.text().splitlines()
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in lines)
    body = lines[lines.index("") + 1 :]
    assert body[:6] == [
        "name          a",
        "              b",
        "---------  ----",
        "x             1",
        "              2",
        "long name  0.10",
    ]
    assert body[7].startswith("- note") and body[8].startswith("  note")


def test_markdown() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[0].startswith("## Title")
    assert lines[2:6] == [
        "| name      |  a b |",
        "|:----------|-----:|",
        "| x         |  1 2 |",
        "| long name | 0.10 |",
    ]
    assert lines[7].startswith("- note")


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_many(count: int, text: str) -> None:
    assert many(count, "row") == text


@pytest.mark.parametrize(("values", "text"), [([8], "8"), ([8, 8], "8"), ([64, 8, 9], "8 to 64")])
def test_span(values: list[float], text: str) -> None:
    assert span(values) == text


def test_failures_are_grouped_by_reason() -> None:
    assert failures([("a", "no"), ("b", "other"), ("c", "no")]) == ["failed: a, c: no", "failed: b: other"]
    assert failures([]) == []


def test_bullets() -> None:
    wrapped = bullets(["one", "word " * 20]).splitlines()
    assert wrapped[0] == "- one" and wrapped[1].startswith("- word") and wrapped[2].startswith("  word")
    assert max(map(len, wrapped)) <= WIDTH
    assert bullets(["word " * 20], wrap=False).count("\n") == 0
