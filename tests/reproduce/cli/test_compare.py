"""compare: its output as text, Markdown, CSV, JSON and as a grid, and when --fail-on-regression fails."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.records.places import MEASURED, RESULTS
from reproduce.records.record import Result, save
from reproduce.tables.layout import WIDTH

from ..made import record, row

PAPER, SPEED = str(RESULTS / "paper"), "--filter experiment=amoebanet-speed"


def published(seconds: float) -> list[Result]:
    """Make two rows. According to the papers, the second is 1.54 times as fast."""
    return [
        row(name, time, experiment="amoebanet-speed", over="naive", published=f"tg-amoebanetd-speed/{link}")
        for name, link, time in (("naive", "n2m1", 1.0), ("GPipe", "n2m4", seconds))
    ]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with three records of a grid of rows: `b` is twice as fast at m=4, `c` is incomplete."""
    monkeypatch.chdir(tmp_path)

    def grid(fast: float, ns: tuple[int, ...] = (2, 10)) -> list[Result]:
        return [
            row(f"n{n}m{m}", fast if m == 4 else 1.0, config={"partitions": n, "chunks": m, "k": n * m})
            for n in ns
            for m in (1, 4)
        ]

    sides = {
        "a": grid(1.0),
        "b": grid(0.5),
        "c": [*grid(1.0, ns=(10,)), row("new", 1.0, config={"partitions": 4, "chunks": 1})],
        "few": [row("n2m1", [1.0], config={"partitions": 2, "chunks": 1, "k": 2})],
        "none": [],
        "fast": published(0.5),
        "slow": published(1.0),
    }
    for name, rows in sides.items():
        save(record(*rows), Path(name))


BETTER = "e: throughput in samples/s; higher is better"
GRID = "a b --row n --col m"
GRIDS = ["e: throughput, B/A", "", r"n \ m 1 4", "----- ------ ------"]


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("a b", [
            BETTER, "", "row A B B/A interval verdict", "------------------- ---- ---- ---- --------- -------",
            "n2m1 8.00 8.00 1.00 0.99-1.01 ~", "n2m4 8.00 16.0 2.00 1.98-2.02 better",
            "n10m1 8.00 8.00 1.00 0.99-1.01 ~", "n10m4 8.00 16.0 2.00 1.98-2.02 better", "geometric mean of 4 1.41",
            "", "- A: a (1 record, measured on a CPU)",
        ]),
        ("a b --format markdown --filter n=2,3 --filter row=n2m4", [
            f"## {BETTER}", "", "| row | A | B | B/A | interval | verdict |",
            "|:--------------------|-----:|-----:|-----:|----------:|--------:|",
            "| n2m4 | 8.00 | 16.0 | 2.00 | 1.98-2.02 | better |",
        ]),
        ("a b c --filter n=2 --filter n=10 --filter m=4", [
            BETTER, "", "row A B C", "------------------------ ---- --------- ---------", "n2m4 8.00 16.0 missing",
            "x 2.00", "1.98-2.02", "better", "n10m4 8.00 16.0 8.00", "x 2.00 x 1.00", "1.98-2.02 0.99-1.01", "better ~",
            "geometric mean of 1 or 2 x 2.00 x 1.00", "", "- missing in C: 1 row; --all names them",
        ]),
        ("a few --all", [
            BETTER, "", "row A B B/A interval verdict", "------------------- ---- ---- ---- -------- --------",
            "n2m1 8.00 8.00 1.00 too few;", "needs 5", "geometric mean of 1 1.00", "",
            "- missing in B: n2m4, n10m1, n10m4",
        ]),
        (GRID, [*GRIDS, "2 1.00 ~ 2.00 +", "10 1.00 ~ 2.00 +"]),
        (f"{GRID} --metric speedup", ["e: speedup, each side over its own, B/A", *GRIDS[1:], "2 1 2.00 +"]),
        (f"{GRID} --filter n=10", [*GRIDS, "10 1.00 ~ 2.00 +"]),
        (f"{PAPER} {MEASURED} {SPEED}", ["amoebanet-speed: throughput, each side over its own; higher is better"]),
    ],
)  # fmt: skip
def test_what_is_shown(asked: str, lines: list[str], command: Any) -> None:
    shown, err = command("compare", *asked.split())
    assert [" ".join(line.split()) for line in shown.splitlines()][: len(lines)] == lines and not err
    assert "markdown" in asked or max(map(len, shown.splitlines())) <= WIDTH
    assert PAPER not in asked or ("\nn8m32 (emulated) " in shown and "measured and emulated on " in shown)


UNDECIDED = "no row could be decided, so nothing shows that there is no regression"


@pytest.mark.parametrize(
    ("sides", "complaint", "shown"),
    [
        ("b a", "2 rows worse than in A: n2m4 (e), n10m4 (e)", "geometric mean"),
        ("b a --threshold 2.0", None, "geometric mean"),
        ("a few", UNDECIDED, "needs 5"),
        ("a none", UNDECIDED, "no row has numbers on two sides"),
        (f"{PAPER} fast {SPEED}", None, "geometric mean"),
        (f"{PAPER} slow {SPEED}", "1 row worse than in A: GPipe (amoebanet-speed)", "geometric mean"),
    ],
)
def test_the_gate(sides: str, complaint: str | None, shown: str, command: Any) -> None:
    """The table is printed in both cases."""
    plain, _ = command("compare", *sides.split())
    out, err = command("compare", *sides.split(), "--fail-on-regression", code=int(complaint is not None))
    assert out == plain and shown in plain and err == (f"reproduce: {complaint}\n" if complaint else "")


def test_csv_and_json(command: Any) -> None:
    out, _ = command("compare", "a", "b", "--format", "csv")
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(out)))
    last = rows[-1]
    assert len(rows) == 8
    assert {"row": "n10m4", "side": "B", "name": "b", "verdict": "better", "samples": "8"}.items() <= last.items()
    assert 1.9 < float(last["low"]) <= float(last["ratio"]) <= float(last["high"]) < 2.1
    out, _ = command("compare", "a", "b", "c", "--format", "json")
    data = json.loads(out)
    assert data["sides"] == {"A": "a", "B": "b", "C": "c"}
    (table,) = data["tables"]
    assert table["geometric_mean"]["B"] == pytest.approx(2**0.5)
    assert "missing in C: n2m1, n2m4" in table["notes"]
    assert {row["side"] for row in table["rows"]} == {"A", "B", "C"}
