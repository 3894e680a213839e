"""Comparisons as a terminal's table, Markdown, CSV and JSON; a grid of one; and what does not pass."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.records.record import Result, save
from reproduce.tables.comparison import compared
from reproduce.tables.layout import WIDTH

from ..made import record, row


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make three sides of a grid of rows, of which the second is twice as fast with m=4, and the third incomplete."""
    monkeypatch.chdir(tmp_path)

    def grid(fast: float, ns: tuple[int, ...] = (2, 10)) -> list[Result]:
        return [
            row(f"n{n}m{m}", fast if m == 4 else 1.0, config={"partitions": n, "chunks": m, "k": n * m})
            for n in ns
            for m in (1, 4)
        ]

    sides = {
        "a.json": grid(1.0),
        "b.json": grid(0.5),
        "c.json": [*grid(1.0, ns=(10,)), row("new", 1.0, config={"partitions": 4, "chunks": 1})],
        "few.json": [row("n2m1", [1.0], config={"partitions": 2, "chunks": 1, "k": 2})],
        "none.json": [],
    }
    for name, rows in sides.items():
        save(record(*rows), Path(name))
    return list(sides)[:3]


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


BETTER = "e: throughput in samples/s; higher is better"
GRID: dict[str, Any] = {"down": ["n"], "across": ["m"]}
GRIDS = ["e: throughput, B/A", "", r"n \ m 1 4", "----- ------ ------"]


@pytest.mark.parametrize(
    ("sides", "options", "lines"),
    [
        (2, {}, [
            BETTER, "", "row A B B/A interval verdict", "------------------- ---- ---- ---- --------- -------",
            "n2m1 8.00 8.00 1.00 0.99-1.01 ~", "n2m4 8.00 16.0 2.00 1.98-2.02 better",
            "n10m1 8.00 8.00 1.00 0.99-1.01 ~", "n10m4 8.00 16.0 2.00 1.98-2.02 better", "geometric mean of 4 1.41",
            "", "- A: a.json (1 record, measured on a CPU)",
        ]),
        (2, {"style": "markdown", "filters": ["n=2", "m=4"]}, [
            f"## {BETTER}", "", "| row | A | B | B/A | interval | verdict |",
            "|:--------------------|-----:|-----:|-----:|----------:|--------:|",
            "| n2m4 | 8.00 | 16.0 | 2.00 | 1.98-2.02 | better |",
        ]),
        (3, {"filters": ["m=4"]}, [
            BETTER, "", "row A B C", "------------------------ ---- --------- ---------", "n2m4 8.00 16.0 missing",
            "x 2.00", "1.98-2.02", "better", "n10m4 8.00 16.0 8.00", "x 2.00 x 1.00", "1.98-2.02 0.99-1.01", "better ~",
            "geometric mean of 1 or 2 x 2.00 x 1.00", "", "- missing in C: n2m4",
        ]),
        (2, GRID, [*GRIDS, "2 1.00 ~ 2.00 +", "10 1.00 ~ 2.00 +"]),
        (2, {**GRID, "metric": "speedup"}, ["e: speedup, each side over its own, B/A", *GRIDS[1:], "2 1 2.00 +"]),
        (2, {**GRID, "filters": ["n=10"]}, [*GRIDS, "10 1.00 ~ 2.00 +"]),
    ],
)  # fmt: skip
def test_what_is_shown(sides: int, options: dict[str, Any], lines: list[str], paths: list[str]) -> None:
    text, complaint = compared(paths[:sides], **options)
    assert complaint is None and squeezed(text)[: len(lines)] == lines
    assert options.get("style") or max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("sides", "options", "complaint"),
    [
        (["b.json", "a.json"], {}, "2 rows worse than in A: n2m4 (e), n10m4 (e)"),
        (["b.json", "a.json"], {"threshold": 2.0}, None),
        (["a.json", "few.json"], {}, "no row could be decided, so nothing shows that there is no regression"),
        (["a.json", "none.json"], {}, "no row could be decided, so nothing shows that there is no regression"),
    ],
)
def test_what_does_not_pass(sides: list[str], options: dict[str, Any], complaint: str | None, paths: list[str]) -> None:
    text, why = compared(sides, **options)
    assert why == complaint
    assert ("needs 5" in text) == ("few.json" in sides)
    assert text.startswith("no row has numbers on two sides") == ("none.json" in sides)


def test_csv_and_json(paths: list[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(compared(paths[:2], style="csv")[0])))
    last = rows[-1]
    assert len(rows) == 8
    assert {"row": "n10m4", "side": "B", "name": "b.json", "verdict": "better", "samples": "8"}.items() <= last.items()
    assert 1.9 < float(last["low"]) <= float(last["ratio"]) <= float(last["high"]) < 2.1
    data = json.loads(compared(paths, style="json")[0])
    assert data["sides"] == {"A": "a.json", "B": "b.json", "C": "c.json"}
    (table,) = data["tables"]
    assert table["geometric_mean"]["B"] == pytest.approx(2**0.5)
    assert "missing in C: n2m1, n2m4" in table["notes"]
    assert {row["side"] for row in table["rows"]} == {"A", "B", "C"}
