"""compare: its output as text, Markdown, CSV, JSON, and when --fail-on-regression fails."""

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from reproduce.numbers.notes import IN_TURN
from reproduce.records.places import MEASURED, RESULTS
from reproduce.records.record import Result, save
from reproduce.tables.layout import WIDTH
from reproduce.tables.output import FIELDS

from ..made import STEADY, record, row

PAPER, SPEED = shlex.quote(str(RESULTS / "paper")), "--filter experiment=amoebanet-speed"
BETTER = "e: throughput in samples/s; higher is better"
UNDECIDED = "no row could be decided, so nothing shows that there is no regression"


def published(seconds: float) -> list[Result]:
    """Make two rows. According to the papers, the second is 1.54 times as fast."""
    return [
        row(
            name,
            time,
            experiment="amoebanet-speed",
            over="naive",
            published=f"tg-amoebanetd-speed/{link}",
        )
        for name, link, time in (("naive", "n2m1", 1.0), ("GPipe", "n2m4", seconds))
    ]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with three records of a grid of rows: `b` is twice as fast at m=4, `c` is incomplete."""
    monkeypatch.chdir(tmp_path)

    def grid(fast: float, ns: tuple[int, ...] = (2, 10)) -> list[Result]:
        every = [(n, m) for n in ns for m in (1, 4)]
        return [
            row(f"n{n}m{m}", fast if m == 4 else 1.0, config={"partitions": n, "chunks": m})
            for n, m in every
        ]

    sides = {
        "a": grid(1.0),
        "b": grid(0.5),
        "c": [*grid(1.0, ns=(10,)), row("new", 1.0, config={"partitions": 4, "chunks": 1})],
        "few": [row("n2m1", [1.0], config={"partitions": 2, "chunks": 1})],
        "none": [],
        "busy": [
            row("n2m1", [*STEADY], config={"partitions": 2, "chunks": 1}, others=[0.0] * 7 + [0.2])
        ],
        "fast": published(0.5),
        "slow": published(1.0),
    }
    for name, rows in sides.items():
        save(record(*rows), Path(name))


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        (
            "a b",
            [
                BETTER,
                "",
                "row A B B/A interval verdict",
                "------------------- ---- ---- ---- --------- -------",
                "n2m1 8.00 8.00 1.00 0.99-1.01 ~",
                "n2m4 8.00 16.0 2.00 1.98-2.02 better",
                "n10m1 8.00 8.00 1.00 0.99-1.01 ~",
                "n10m4 8.00 16.0 2.00 1.98-2.02 better",
                "geometric mean of 4 1.41",
                "",
                "- A: a (1 record, measured on a CPU)",
            ],
        ),
        (
            "a b --format markdown --filter n=2,3 --filter row=n2m4",
            [
                f"## {BETTER}",
                "",
                "| row | A | B | B/A | interval | verdict |",
                "|:--------------------|-----:|-----:|-----:|----------:|--------:|",
                "| n2m4 | 8.00 | 16.0 | 2.00 | 1.98-2.02 | better |",
            ],
        ),
        (
            "a b c --filter n=2 --filter n=10 --filter m=4",
            [
                BETTER,
                "",
                "row A B C",
                "------------------------ ---- --------- ---------",
                "n2m4 8.00 16.0 missing",
                "x 2.00",
                "1.98-2.02",
                "better",
                "n10m4 8.00 16.0 8.00",
                "x 2.00 x 1.00",
                "1.98-2.02 0.99-1.01",
                "better ~",
                "geometric mean of 1 or 2 x 2.00 x 1.00",
                "",
                "- missing in C: 1 row; --all names them",
            ],
        ),
        (
            "a few --all",
            [
                BETTER,
                "",
                "row A B B/A interval verdict",
                "------------------- ---- ---- ---- -------- --------",
                "n2m1 8.00 8.00 1.00 too few;",
                "needs 5",
                "geometric mean of 1 1.00",
                "",
                "- missing in B: n2m4, n10m1, n10m4",
            ],
        ),
        (
            "a b --metric speedup --filter n=2",
            ["e: speedup, each side over its own; higher is better"],
        ),
        (
            f"{PAPER} {shlex.quote(str(MEASURED))} {SPEED}",
            ["amoebanet-speed: throughput, each side over its own; higher is better"],
        ),
    ],
)
def test_what_is_shown(asked: str, lines: list[str], command: Any) -> None:
    shown, err = command("compare", *shlex.split(asked))
    assert [" ".join(line.split()) for line in shown.splitlines()][
        : len(lines)
    ] == lines and not err
    assert "markdown" in asked or max(map(len, shown.splitlines())) <= WIDTH
    assert PAPER not in asked or (
        "\nn8m32 (emulated) " in shown and "measured and emulated on " in shown
    )


@pytest.mark.parametrize(
    ("sides", "complaint", "shown"),
    [
        ("b a", "2 rows worse than in A: n2m4 (e), n10m4 (e)", "geometric mean"),
        ("b a --threshold 2.0", None, "geometric mean"),
        ("a few", UNDECIDED, "needs 5"),
        ("a none", UNDECIDED, "no row has numbers on two sides"),
        (
            "a a",
            f"A and B hold the same records, of the same runs; {IN_TURN}",
            "A and B hold the same records",
        ),
        ("a busy", UNDECIDED, " disturbed\n"),
        (f"{PAPER} fast {SPEED}", None, "geometric mean"),
        (
            f"{PAPER} slow {SPEED}",
            "1 row worse than in A: GPipe (amoebanet-speed)",
            "geometric mean",
        ),
    ],
)
def test_the_gate(sides: str, complaint: str | None, shown: str, command: Any) -> None:
    """The table is printed in all cases."""
    plain, _ = command("compare", *shlex.split(sides))
    code = 0 if complaint is None else 1 if " worse " in complaint else 2
    out, err = command("compare", *shlex.split(sides), "--fail-on-regression", code=code)
    assert (
        out == plain
        and shown in plain
        and err == (f"reproduce: {complaint}\n" if complaint else "")
    )


@pytest.mark.parametrize(
    ("asked", "kind", "unit", "metrics"),
    [
        ("show a", "measured", "s", {"throughput", "time"}),
        ("compare a b", "measured", "samples/s", {"throughput"}),
        ("show results/paper/tg-unet-speed.json", "published", "samples/s", {"throughput"}),
        (
            "show results/predicted/unet-speed-p40x8.json",
            "predicted",
            "samples/s",
            {"throughput", "time"},
        ),
        ("predict unet-speed --out elsewhere", "predicted", "samples/s", {"throughput", "time"}),
        (
            "plan unet --size 1 8 --batch-size 8 --devices 2",
            "predicted",
            "bytes",
            {"memory", "bubble", "balance"},
        ),
        ("list", None, None, {"scale", "rows", "minutes"}),
        ("list unet-speed", None, None, {"batch", "m", "needs"}),
    ],
)
def test_one_schema(
    asked: str, kind: str | None, unit: str | None, metrics: set[str], command: Any
) -> None:
    words = [word.replace("results", str(RESULTS)) for word in asked.split()]
    data = json.loads(command(*words, "--json")[0])
    numbers = data["numbers"]
    assert data["schema"] == 1 and numbers and all(tuple(each) == FIELDS for each in numbers)
    assert {each["kind"] for each in numbers if each["row"] != "geometric mean"} == {kind}
    assert unit in {each["unit"] for each in numbers}
    assert metrics <= {each["metric"] for each in numbers}
    assert len([*csv.DictReader(io.StringIO(command(*words, "--csv")[0]))]) == len(numbers)
