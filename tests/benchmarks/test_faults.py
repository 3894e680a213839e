"""`benchmarks.faults`: whether it finds what is wrong, which cases there are, and a few of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.child import ROOT
from benchmarks.faults import main
from benchmarks.faults_cases import Cell, all_cells
from benchmarks.faults_judge import error_in, judged
from benchmarks.faults_outside import Ended, Seen
from benchmarks.faults_table import table
from reproduce.records.record import Record, Result, load

RAISES = Cell("raising", "forward", 2)
TRACEBACK = 'Traceback (most recent call last):\n  File "/a/train.py", line 7, in <module>\n    raise error\n'
OWN = f"{TRACEBACK}ValueError: the layer's own message\n"
TOLD = f"{TRACEBACK}RankFailed: rank 2 failed in forward of micro-batch 1: ValueError: the layer's own message\n"
ENDED = {rank: Ended(1, 0.5) for rank in range(4)}
ERRORS = {0: TOLD, 1: TOLD, 2: OWN, 3: "[W123 a warning of gloo]\n" + TOLD.replace("\n", "\n[rank3]: ")}
GOOD = Seen(ENDED, ERRORS, [], happened=True)


def but(rank: int, error: str) -> Seen:
    return GOOD._replace(errors={**ERRORS, rank: error})


WRONG: list[tuple[Cell, Seen, list[str]]] = [
    (RAISES, GOOD, []),
    (RAISES, GOOD._replace(left=["process 7 (python)"]), ["left: process 7 (python)"]),
    (RAISES, GOOD._replace(happened=False), ["it did not come to pass: RankFailed: rank 2 failed in forward of"]),
    (RAISES, GOOD._replace(ended={**ENDED, 1: Ended(1, 5.5)}), ["rank 1: it ended after 5.5 s"]),
    (RAISES, GOOD._replace(ended={**ENDED, 3: Ended(-6, 0.5)}), ["rank 3: it ended with -6"]),
    (RAISES, GOOD._replace(ended={0: Ended(0, 1.0), 1: ENDED[1], 2: ENDED[2]}),
     ["rank 0: it ended with 0", "rank 3: it did not end"]),
    (RAISES, but(0, ""), ["rank 0: 0 errors"]),
    (RAISES, but(0, TOLD + TOLD), ["rank 0: 2 errors"]),
    (RAISES, but(1, TOLD.replace("rank 2", "rank 3")), ["rank 1: the rank is not named: RankFailed: rank 3 failed"]),
    (RAISES, but(1, TOLD.replace("forward", "backward")), ["rank 1: its task is not named: RankFailed: rank 2"]),
    (RAISES, but(1, TOLD.replace("the layer's own", "some")), ["rank 1: its message is not said: RankFailed: rank 2"]),
    (RAISES, but(2, TOLD.replace("the layer's own", "some")), ["rank 2: its own error is not said: RankFailed"]),
    (RAISES, but(3, TOLD + "terminate called without an active exception\n"), ["rank 3: also printed: terminate"]),
    (Cell("stopped", "loss", 2), but(0, TOLD), ["rank 0, rank 1, rank 3: its task is not named"]),
    (Cell("killed", "forward", 2), GOOD._replace(ended={**ENDED, 2: Ended(-9, 0.1)}), []),
    (Cell("killed", "forward", 2), but(2, ""), []),
    (Cell("hang", "forward", 2), GOOD._replace(ended={**ENDED, 2: Ended(-15, 9.0)}), []),
    (Cell("a pause", "optimizer", 2), GOOD._replace(ended={k: Ended(0, 9.0) for k in range(4)}), []),
    (Cell("a pause", "optimizer", 2), GOOD._replace(ended={**ENDED, 2: Ended(0, 9.0)}),
     ["rank 0, rank 1, rank 3: it ended with 1: RankFailed: rank 2 failed"]),
]  # fmt: skip


@pytest.mark.parametrize("cell, seen, said", WRONG)
def test_what_is_wrong_is_found(cell: Cell, seen: Seen, said: list[str]) -> None:
    wrong = judged(cell, seen, limit=5.0)
    assert len(wrong) == len(said), wrong
    assert all(each.startswith(start) for each, start in zip(wrong, said, strict=True)), wrong


def test_an_error_is_read_without_traceback_and_folders() -> None:
    printed = TOLD.replace("the layer's own message", "no /a/folder/file here").replace("\n", "\n[rank3]: ")
    said = "RankFailed: rank 2 failed in forward of micro-batch 1: ValueError: no file here"
    assert error_in(f"[rank3]: {printed}") == said


def test_each_fault_befalls_each_rank_in_each_phase_or_it_is_said_why_not() -> None:
    counts = Counter(cell.fault for cell in all_cells())
    whole = 4 * 9
    assert {fault: counts[fault] for fault in ("killed", "stopped", "link cut")} == dict.fromkeys(
        ("killed", "stopped", "link cut"), whole
    )
    assert counts["raising"] == counts["out of memory"] == whole - 3  # the last rank alone has a loss
    assert counts["hang"] == whole - 3 - 3 * 4  # in three phases that would be a pause
    assert counts["a pause"] == 3 * 4


def test_the_table() -> None:
    results = [
        Result("killed: forward", "rank 0", "measured", values={"last": 1.5}),
        Result("killed: forward", "rank 2", "measured", values={"last": 0.5, "rank 0": "rank 2 | died"}),
        Result("killed: loss", "rank 1", "failed", reason="rank 0: it did not end"),
        Result("link cut: loss", "rank 1", "not run"),
        Result("a pause: optimizer", "rank 1", "measured"),
        Result("a pause: optimizer", "rank 2", "failed", reason="rank 0: it ended with 1"),
        Result("under torchrun", "killed", "measured", values={"ended after": "1.5", "blames": "rank 2, exit code -9"}),
    ]
    page = table(Record("faults", "", "measured", {}, results), "pipe")
    narrow = "\n".join("|".join(cell.strip() for cell in line.split(" | ")) for line in page.splitlines())
    for part in (
        "killed|not run|not run|1.5|not run|not run|**1 of 1 fail**|",
        "hang|-|not run|",
        "killed: loss|rank 1|rank 0: it did not end",
        "killed|rank 2 \\| died",
        "a pause|optimizer|1 of 2",
        "killed|1.5|rank 2, exit code -9",
    ):
        assert part in narrow, f"{part}\n{narrow}"


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "killed", "drowned"])
    assert "there is no case 'drowned'; the first are 'killed: loading data: rank 0'" in capsys.readouterr().err


@pytest.mark.slow
def test_each_fault_once(tmp_path: Path) -> None:
    """Without a limit that a busy machine could miss; what is measured is in the record that is committed."""
    cases = [
        "killed: first mini-batch: rank 3",
        "stopped: recomputation: rank 0",
        "raising: optimizer: rank 2",
        "out of memory: evaluation: rank 1",
        "hang: backward: rank 2",
        "link cut: loading data: rank 1",
        "stopped: saving: rank 3",
        "a pause: loading data: rank 0",
        "all ranks stopped, and continued: backward",
    ]
    path = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--more", "60", "--json", str(path), "--only", *cases],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(load(path).results) == len(cases)
