"""Render: one comparison as a terminal's table, Markdown, CSV and JSON; a grid of it; and picked rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.numbers.metric import Reading
from reproduce.records.record import Record, Result, save
from reproduce.tables.compare import Question, answer
from reproduce.tables.comparison import number
from reproduce.tables.layout import WIDTH

Make = Callable[..., Record]
MakeRow = Callable[..., Result]


@pytest.fixture
def paths(tmp_path: Path, record: Make, row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make three sides of a grid of rows, of which the second is twice as fast with m=4, and the third incomplete."""
    monkeypatch.chdir(tmp_path)

    def grid(fast: float, ns: tuple[int, ...] = (2, 10)) -> list[Result]:
        return [
            row(f"n{n}m{m}", fast if m == 4 else 1.0, config={"partitions": n, "chunks": m, "k": n * m})
            for n in ns
            for m in (1, 4)
        ]

    save(record(*grid(1.0)), Path("a.json"))
    save(record(*grid(0.5)), Path("b.json"))
    save(record(*grid(1.0, ns=(10,)), row("new", 1.0, config={"partitions": 4, "chunks": 1})), Path("c.json"))
    return ["a.json", "b.json", "c.json"]


def test_two_sides(paths: list[str]) -> None:
    text, complaint = answer(paths[:2], Question())
    assert complaint is None
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:9] == [
        "e: throughput in samples/s; higher is better",
        "",
        "row A B B/A interval verdict",
        "------------------- ---- ---- ---- --------- -------",
        "n2m1 8.00 8.00 1.00 0.99-1.01 ~",
        "n2m4 8.00 16.0 2.00 1.98-2.02 better",
        "n10m1 8.00 8.00 1.00 0.99-1.01 ~",
        "n10m4 8.00 16.0 2.00 1.98-2.02 better",
        "geometric mean of 4 1.41",
    ]
    assert "- A: a.json (1 record, measured on a CPU)" in lines
    assert max(map(len, text.splitlines())) <= WIDTH


def test_more_sides(paths: list[str]) -> None:
    text, _ = answer(paths, Question())
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "missing in C: n2m1, n2m4" in text and "missing in A and B: new" in " ".join(text.split())
    assert "x 2.00" in text and "1.98-2.02" in text


def test_a_regression_is_the_complaint(paths: list[str]) -> None:
    _, complaint = answer(["b.json", "a.json"], Question())
    assert complaint == "2 rows worse than in A: n2m4 (e), n10m4 (e)"
    assert answer(["b.json", "a.json"], Question(threshold=2.0))[1] is None


def test_a_gate_that_compares_nothing_is_shut(paths: list[str], record: Make, row: MakeRow) -> None:
    save(record(row("n2m1", [1.0], config={"partitions": 2, "chunks": 1, "k": 2})), Path("few.json"))
    text, complaint = answer(["a.json", "few.json"], Question())
    assert "needs 5" in text
    assert complaint == "no row could be decided, so nothing shows that there is no regression"
    save(record(), Path("none.json"))
    text, complaint = answer(["a.json", "none.json"], Question())
    assert text.startswith("no row has numbers on two sides") and complaint is not None


def test_markdown(paths: list[str]) -> None:
    text, _ = answer(paths[:2], Question(style="markdown"))
    assert text.startswith("## e: throughput in samples/s; higher is better\n\n| row ")
    assert "| n2m4                | 8.00 | 16.0 | 2.00 | 1.98-2.02 |  better |" in text


def test_csv(paths: list[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(answer(paths[:2], Question(style="csv"))[0])))
    assert len(rows) == 8
    last = rows[-1]
    assert (last["row"], last["side"], last["name"], last["verdict"], last["samples"]) == (
        "n10m4",
        "B",
        "b.json",
        "better",
        "8",
    )
    assert 1.9 < float(last["low"]) <= float(last["ratio"]) <= float(last["high"]) < 2.1


def test_json(paths: list[str]) -> None:
    data = json.loads(answer(paths, Question(style="json"))[0])
    assert data["sides"] == {"A": "a.json", "B": "b.json", "C": "c.json"}
    (table,) = data["tables"]
    assert table["geometric_mean"]["B"] == pytest.approx(2**0.5)
    assert "missing in C: n2m1, n2m4" in table["notes"]
    assert {row["side"] for row in table["rows"]} == {"A", "B", "C"}


def test_a_grid(paths: list[str]) -> None:
    text, _ = answer(paths[:2], Question(rows=["n"], columns=["m"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:6] == [
        "e: throughput, B/A", "", r"n \ m 1 4", "----- ------ ------", "2 1.00 ~ 2.00 +", "10 1.00 ~ 2.00 +",
    ]  # fmt: skip


def test_rows_that_share_a_cell_are_refused(paths: list[str]) -> None:
    with pytest.raises(Error, match="'n2m1' and 'n10m1' are both at e x 1; name another field, such as partitions, k"):
        answer(paths[:2], Question(rows=["experiment"], columns=["m"]))


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        (["n=2"], ["n2m1", "n2m4"]),
        (["m=4"], ["n2m4", "n10m4"]),
        (["n=2,10", "m=1"], ["n2m1", "n10m1"]),
        (["row=n2m4"], ["n2m4"]),
        (["experiment=e", "k=40"], ["n10m4"]),
    ],
)
def test_filters(filters: list[str], rows: list[str], paths: list[str]) -> None:
    data = json.loads(answer(paths[:2], Question(style="json", filters=filters))[0])
    assert [row["row"] for row in data["tables"][0]["rows"]] == [name for name in rows for _ in "AB"]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question(filters=["n"]), "--filter n: give a field and its values, as in --filter n=2,4"),
        (Question(filters=["=2"]), "--filter =2: give a field and its values"),
        (Question(filters=["n=3"]), "--filter n=3: no row is left; n is 2, 10"),
        (Question(filters=["x=3"]), "--filter x=...: no row has x; there are experiment, row, scale, device, model"),
        (Question(rows=["x"], columns=["m"]), "--row x: no row has x; there are experiment, row, scale, device, model"),
        (Question(rows=["n"], columns=["m", "x"]), "--col x: no row has x; there are experiment, row, scale, device"),
        (Question(metric="speed"), "--metric speed: no row has it; there are throughput, time, speedup"),
    ],
)
def test_what_is_not_there_is_refused(question: Question, message: str, paths: list[str]) -> None:
    with pytest.raises(Error) as caught:
        answer(paths[:2], question)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (16.25, "samples/s", "16.2"),
        (16.0, "samples/s", "16.0"),
        (132.4, "samples/s", "132"),
        (999.7, "samples/s", "1,000"),
        (1234.5, "samples/s", "1,234"),
        (81505540.0, "count", "81,505,540"),
        (0.0, "", "0"),
        (2.5e-5, "s", "2.50e-05"),
        (3 * 2**20, "bytes", "3 MiB"),
        (20.0, "GiB", "20.00 GiB"),
        (1024.0, "MiB", "1.00 GiB"),
    ],
)
def test_numbers(value: float, unit: str, text: str) -> None:
    assert number(Reading(value, unit)) == text
