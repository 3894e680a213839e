"""Tests of the command `compare`, which compares records of benchmark results.

The tests check the output formats, and the cases in which `compare --fail-on-regression` fails.
"""

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from reproduce.numbers.notes import IN_TURN
from reproduce.records.places import MEASURED, RESULTS
from reproduce.records.record import Record, Result, save
from reproduce.tables.layout import WIDTH
from reproduce.tables.output import FIELDS

from ..made import STEADY, one_line, record, row

PAPER, SPEED = shlex.quote(str(RESULTS / "paper")), "--filter experiment=amoebanet-speed"
NOISY = [0.2, 0.25, 0.3, 0.9, 1.1, 3.0, 4.0, 5.0]
"""Times of steps, in seconds."""
BETTER = "e: throughput in samples/s; higher is better"
NO_SPEED = "no throughput could be judged, so it is not known whether there is a regression"
NONE_JUDGED = "no row could be judged, so it is not known whether there is a regression"
ACCEPT = "--allow-missing accepts this"
TOO_FEW = "too few samples (B/A; needs 5)"
TOO_NOISY = "too noisy (B/A: the ends of the interval differ 4-fold or more)"
MISSING = "missing in B: n2m4 (e), n10m1 (e), n10m4 (e)"
LACKING = "missing in B: n2m1 (e), n2m4 (e)"
LINKED = "n10m1 (e), n10m4 (e)"
FAILING = f"{TOO_FEW}: n2m4 (e); no number (failed) in B: n10m1 (e); missing in B: n10m4 (e)"
NOT_REPRODUCED = "nothing is worse, but absolute speed is not judged: "
MACHINES = "absolute speed is not judged: the sides ran on different machines"


def published(seconds: float) -> list[Result]:
    """Make two measured results that have the configurations of two rows of a published table.

    In the published table, the second row is 1.54 times as fast as the first row. A step takes 1 s
    in the first measured result, and `seconds` in the second one.
    """
    fields = {"experiment": "amoebanet-speed", "over": "naive"}
    naive = row("naive", 1.0, published="tg-amoebanetd-speed/n2m1", **fields)
    gpipe = row("GPipe", seconds, published="tg-amoebanetd-speed/n2m4", **fields)
    return [naive, gpipe]


def sized(
    n: int, m: int, seconds: float | list[float], link: str | None = None, **changes: Any
) -> Result:
    config = {"partitions": n, "chunks": m, "link": link}
    return row(f"n{n}m{m}", seconds, config=config, **changes)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with records of runs, which the tests compare.

    The records `a`, `b` and `c` have results for several configurations. Record `b` is twice as
    fast as record `a` with four micro-batches (m=4). Record `c` lacks some of these results.
    """
    monkeypatch.chdir(tmp_path)
    new = row("new", 1.0, config={"partitions": 4, "chunks": 1})
    busy = [0.0] * 7 + [0.2]
    memory = row("bytes", experiment="e-memory", values={"peak_allocated": [1000]})
    n2m1, n10m1, n10m4 = sized(2, 1, 1.0), sized(10, 1, 1.0), sized(10, 4, 1.0)
    sides = {
        "a": [n2m1, sized(2, 4, 1.0), n10m1, n10m4],
        "b": [n2m1, sized(2, 4, 0.5), n10m1, sized(10, 4, 0.5)],
        "c": [n10m1, n10m4, new],
        "few": [sized(2, 1, [1.0])],
        "none": [],
        "counted": [row("n2m1", values={"peak_allocated": [1000]})],
        "counted-again": [row("n2m1", values={"peak_allocated": [1010]})],
        "counted-more": [row("n2m1", values={"peak_allocated": [1200]})],
        "calls": [row("n2m1", values={"calls": 100, "bubble": 0.1})],
        "more-calls": [row("n2m1", values={"calls": 300, "bubble": 0.107})],
        "sampled-calls": [row("n2m1", samples={"calls": [100 + k for k in range(8)]})],
        "more-sampled-calls": [row("n2m1", samples={"calls": [300 + k for k in range(8)]})],
        "mixed": [n2m1, memory],
        "bubbly": [n2m1, row("bubbles", experiment="e-bubble", values={"bubble": 0.1})],
        "mixed-few": [sized(2, 1, [1.0]), memory],
        "busy": [sized(2, 1, list(STEADY), others=busy)],
        "noisy": [n2m1, sized(2, 4, NOISY), n10m1, n10m4],
        "fast": published(0.5),
        "slow": published(1.0),
        "failing": [n2m1, sized(2, 4, [1.0]), sized(10, 1, 1.0, status="failed", samples={})],
        "linked": [
            n2m1,
            sized(2, 4, 1.0),
            sized(10, 1, 1.0, link="h100x8"),
            sized(10, 4, 1.0, link="h100x8"),
        ],
    }
    elsewhere = {
        "other-machine": [sized(2, 1, 2.0), sized(2, 4, 2.0), sized(10, 1, 2.0), sized(10, 4, 2.0)],
        "slow-base": [sized(2, 1, 1.2), sized(2, 4, 1.0), n10m1, n10m4],
        "alone": [n2m1],
    }
    for name, rows in sides.items():
        save(record(*rows), Path(name))
    foreseen = row("n2m1", status="predicted", hardware="p40x8", values={"throughput": 2.0})
    for name in ("foreseen", "foreseen-again"):
        save(Record(name, "Title", "predicted", {}, [foreseen]), Path(name))
    for name, rows in elsewhere.items():
        save(record(*rows, cpu="another CPU"), Path(name))


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

    found = shown.splitlines()
    assert not err
    assert [one_line(line) for line in found[: len(lines)]] == lines
    if "markdown" not in asked:
        assert max(map(len, found)) <= WIDTH
    if PAPER in asked:
        assert "\nn8m32 (emulated) " in shown
        assert "measured and emulated on " in shown


ALLOWED = "--allow-missing"
# The sides and options, the exit code, what is said, and a part of the printed table.
GATE: list[tuple[str, int, str, str]] = [
    ("a b", 0, "", "geometric mean"),
    ("b a", 1, "2 rows worse than in A: n2m4 (e), n10m4 (e)", "geometric mean"),
    ("a noisy", 2, f"1 row of A could not be judged: {TOO_NOISY}: n2m4 (e); {ACCEPT}", "n2m4"),
    ("b a --threshold 2.0", 0, "", "geometric mean"),
    (
        "b a few",
        1,
        "2 rows worse than in A: n2m4 (e), n10m4 (e); 4 rows of A could not be judged",
        "geometric mean",
    ),
    ("a c", 2, f"2 rows of A could not be judged: {LACKING}; {ACCEPT}", "missing in B: 2 rows"),
    (
        f"a c {ALLOWED}",
        0,
        f"nothing is worse, but 2 rows of A could not be judged: {LACKING}",
        "missing in B: 2 rows",
    ),
    (
        "a c --filter m=1 --filter n=2",
        2,
        f"{NONE_JUDGED}: missing in B: n2m1 (e)",
        "only in A: e (1 row)",
    ),
    ("a failing", 2, f"3 rows of A could not be judged: {FAILING}; {ACCEPT}", "needs 5"),
    ("a few", 2, f"{NONE_JUDGED}: {TOO_FEW}: n2m1 (e); {MISSING}", "needs 5"),
    (f"a few {ALLOWED}", 2, f"{NONE_JUDGED}: {TOO_FEW}: n2m1 (e); {MISSING}", "needs 5"),
    (
        "a none",
        2,
        f"{NONE_JUDGED}: missing in B: n2m1 (e), n2m4 (e), n10m1 (e), n10m4 (e)",
        "no row has numbers on two sides",
    ),
    (
        "a a",
        2,
        f"{NONE_JUDGED}: A and B hold the same records, of the same runs; {IN_TURN}",
        "A and B hold the same records",
    ),
    ("mixed mixed-few", 2, f"1 row of A could not be judged: {TOO_FEW}: n2m1 (e)", "needs 5"),
    (f"mixed mixed-few {ALLOWED}", 2, f"{NO_SPEED}: {TOO_FEW}: n2m1 (e)", "needs 5"),
    ("mixed b --metric throughput", 0, "", "n2m1"),
    ("bubbly b", 2, "1 row of A could not be judged: missing in B: bubbles (e-bubble)", "n2m1"),
    ("mixed b", 2, "1 row of A could not be judged: missing in B: bytes (e-memory)", "n2m1"),
    ("counted counted-again", 0, "", "no samples"),
    ("foreseen foreseen-again", 0, "", "no samples"),
    ("counted counted-more", 1, "1 row worse than in A: n2m1 (e)", "no samples"),
    (f"counted counted-more {ALLOWED}", 1, "1 row worse than in A: n2m1 (e)", "no samples"),
    ("counted-more counted", 0, "", "no samples"),
    ("calls more-calls --metric calls", 2, f"{NONE_JUDGED}: no samples (B/A): n2m1 (e)", "3.00"),
    (
        "sampled-calls more-sampled-calls --metric calls",
        2,
        f"{NONE_JUDGED}: differs, and it is not known whether higher is better (B/A): n2m1 (e)",
        "differs",
    ),
    ("calls more-calls --metric bubble", 2, f"{NONE_JUDGED}: no samples (B/A): n2m1 (e)", "1.07"),
    ("a busy", 2, f"{NONE_JUDGED}: disturbed (B/A): n2m1 (e); {MISSING}", " disturbed\n"),
    (
        "a linked",
        2,
        f'2 rows of A could not be judged: A and B differ in link (null / "h100x8"): {LINKED}; '
        f"{ACCEPT}",
        'A and B differ in link (null / "h100x8"): 2 rows;',
    ),
    ("a other-machine", 0, f"nothing is worse, but {MACHINES}", f"- {MACHINES}"),
    (
        "a slow-base",
        2,
        f"{NONE_JUDGED}: {MACHINES}; divided by a row that itself differs in B: "
        "n2m4 (e), n10m1 (e), n10m4 (e)",
        "ratios to it are not judged",
    ),
    ("a alone --filter row=n2m1", 2, f"{NONE_JUDGED}: {MACHINES}", f"- {MACHINES}"),
    (f"{PAPER} fast {SPEED} {ALLOWED}", 0, NOT_REPRODUCED, "geometric mean"),
    (f"{PAPER} slow {SPEED}", 1, "1 row worse than in A: GPipe (amoebanet-speed); ", "geometric"),
    (f"a b {ALLOWED}", 2, "--allow-missing changes what --fail-on-regression does: give both", ""),
]


@pytest.mark.parametrize(("asked", "code", "said", "shown"), GATE)
def test_the_gate(asked: str, code: int, said: str, shown: str, command: Any) -> None:
    """Check that `--fail-on-regression` changes the exit code of `compare`, but not its table.

    With this option, `compare` fails if a result is worse than in the first record, or if a result
    of the first record could not be judged.
    """
    arguments = shlex.split(asked)
    if not said.startswith(ALLOWED):
        arguments.append("--fail-on-regression")
    plain = [word for word in arguments if word not in (ALLOWED, "--fail-on-regression")]

    table, _ = command("compare", *plain)
    out, err = command("compare", *arguments, code=code)

    assert shown in one_line(table) or shown in table
    if shown:
        assert out == table
    assert err.startswith(f"reproduce: {said}" if said else "")
    assert err.count("\n") == bool(said)


@pytest.mark.quick(6)
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
        (
            "show results/benchmarks/machinery.json",
            "measured",
            "us/task",
            {"forward", "backward", "both"},
        ),
        ("show results/league/mpt.json", "published", "samples/s", {"throughput"}),
        ("schedule ZBVZeroBubble", None, "share of the step", {"step", "bubble", "kept"}),
        ("list", None, None, {"scale", "rows", "minutes"}),
        ("list unet-speed", None, None, {"batch_size", "chunks", "devices"}),
    ],
)
def test_one_schema(
    asked: str, kind: str | None, unit: str | None, metrics: set[str], command: Any
) -> None:
    words = [word.replace("results", str(RESULTS)) for word in asked.split()]

    as_json, _ = command(*words, "--format", "json")
    as_csv, _ = command(*words, "--format", "csv")

    data = json.loads(as_json)
    assert data["schema"] == 1
    numbers = data["numbers"]
    assert numbers
    found: dict[str, set[Any]] = {"kind": set(), "unit": set(), "metric": set()}
    for number in numbers:
        assert tuple(number) == FIELDS
        found["unit"].add(number["unit"])
        found["metric"].add(number["metric"])
        if number["kind"] not in ("measured", "emulated"):
            assert number["engine"] is None, "nothing was run"
        if number["row"] != "geometric mean":
            found["kind"].add(number["kind"])
    assert found["kind"] == {kind}
    assert unit in found["unit"]
    assert metrics <= found["metric"]
    lines = csv.DictReader(io.StringIO(as_csv))
    assert len(list(lines)) == len(numbers)


def test_a_side_is_called_as_it_was_given(tmp_path: Path, command: Any) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (tmp_path / "b").rename(folder / "b.json")
    for given in ("runs", "b", "runs/b.json"):
        printed, _ = command("compare", "./a", given, "--format", "csv")
        names = [line["name"] for line in csv.DictReader(io.StringIO(printed))]
        assert set(names) == {"./a", given}
