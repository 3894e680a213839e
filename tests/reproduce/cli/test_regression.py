"""Tests of the command `regression`, which measures two revisions in turn.

Most tests check exit codes and tables for made-up samples. A few tests run the command for real, in
a repository that is made from this working tree.
"""

import contextlib
import json
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import bisect
from reproduce.regression import main as asked
from reproduce.regression.cases import CASES, OVERLAP
from reproduce.regression.job import Settings
from reproduce.regression.trees import Project, Tree

from ..made import commit, one_line

NAMES = [case.name for case in CASES]
CASE = "U-Net GPipe"
HERE = shlex.quote(__file__)


def made_up(
    monkeypatch: pytest.MonkeyPatch,
    slower: dict[str, float] | None = None,
    ends: BaseException | None = None,
    **unable: list[str],
) -> None:
    """Replace the measuring of two revisions, the base and the head, by made-up samples.

    Args:
        monkeypatch: The fixture that replaces the functions.
        slower: For each case in which the head is slower, the factor.
        ends: The error that ends the measuring.
        unable: For each revision (`base` or `head`), the cases that it cannot run.
    """

    @contextlib.contextmanager
    def trees(base: str, head: str | None, project: Project) -> Iterator[tuple[Tree, Tree]]:
        ours = head or "the working tree"
        yield Tree(ROOT, base, "0" * 40), Tree(ROOT, ours, "1" * 40, dirty=True)

    def interleaved(base: Tree, head: Tree, settings: Settings) -> Iterator[dict[str, object]]:
        for case in settings.cases:
            sides = {side: "ImportError: gone" for side, cases in unable.items() if case in cases}
            if sides:
                yield {"case": case, "unable": sides}
                continue
            factor = (slower or {}).get(case, 1.0)
            for i in range(settings.restarts):
                noise = 1 + (-1) ** i * (i + 1) / 2000
                steady, changed = [], []
                for k in range(settings.rounds):
                    seconds = 0.01 * (1 + k / 1000)
                    steady.append(seconds)
                    changed.append(factor * noise * seconds)
                samples = {"base": steady, "head": changed}
                yield {"case": case, "restart": i, "samples": samples}
                if ends is not None:
                    raise ends

    monkeypatch.setattr(asked, "trees", trees)
    monkeypatch.setattr(asked, "interleaved", interleaved)
    monkeypatch.setattr(bisect, "bisected", lambda *asked: "12ab it")


def test_an_unchanged_tree_passes(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    made_up(monkeypatch)

    out, err = command("regression", "--base", "v1")

    assert err == "restart 1 of 20 done\n"
    assert out.startswith("regression: time in ms; lower is better\n")
    for name in NAMES:
        assert name in out
    table, _, _ = out.partition("\n- ")
    assert "worse" not in table
    (mean,) = [line for line in out.splitlines() if line.startswith("geometric mean of 8")]
    assert mean.split()[4] == "1.00"
    assert mean.endswith("~"), "the mean is judged, too"
    flat = one_line(out)
    for said in (
        "A: v1 (",
        "git 0000000",
        "B: the working tree (",
        "git 1111111+",
        "20 restarts of both sides; in each, 8 pairs",
        "0.01, is shared by 9 tests",
        "wall-clock times on two",
        f"geometric mean of {len(OVERLAP)} ",
    ):
        assert said in flat
    assert "\nregression by wall clock: time in ms; lower is better\n" in out
    assert max(map(len, out.splitlines())) <= 80


def slower(factor: float, *cases: str) -> dict[str, Any]:
    return {"slower": dict.fromkeys(cases or [CASE], factor)}


FIRST, SECOND, *_ = NAMES
WORSE = f"slower than v1: {CASE}"
NEITHER = "give either --base REV, or --bisect GOOD BAD without --head"
NO_CASES = "as in --package mypackage --cases bench/cases.py; got "
# The made-up samples, the options, the exit code, the verdict on a case, and the message.
ASKED: list[tuple[dict[str, Any], str, int, str | None, str]] = [
    (slower(1.1), "--base v1", 1, "worse", WORSE),
    (slower(1.015), "--base v1", 0, "~", ""),
    (slower(1.015), "--base v1 --threshold 0.01", 1, "worse", WORSE),
    (slower(0.8), "--base v1", 0, "better", ""),
    (slower(1.2, *NAMES), "--base v1", 1, "worse", f"{FIRST}, {SECOND}, "),
    (slower(1.1), "--base v1 --head v2 --case naive --case MACHINERY", 0, None, ""),
    (
        slower(1.1, SECOND),
        "--base v1 --restarts 8 --case always",
        1,
        None,
        f"slower than v1: {SECOND}",
    ),
    (
        {},
        "--base v1 --case gpipe --case x",
        2,
        None,
        "--case x: no case has this text in its name; the cases are machinery",
    ),
    (
        {},
        "--base v1 --restarts 5",
        2,
        None,
        "with 8 cases and --alpha 0.01, nothing could be called significant",
    ),
    ({"base": ["machinery never"]}, "--base v1", 0, "~", ""),
    (
        {"head": [CASE]},
        "--base v1",
        2,
        "missing",
        f"1 case cannot run in the working tree: {CASE}: ImportError: gone",
    ),
    (
        {"base": NAMES},
        "--base v1",
        2,
        "missing",
        "no case runs in v1, so nothing shows that there is no regression",
    ),
    ({"ends": Error("it broke")}, "--base v1", 2, None, "it broke"),
    ({"ends": KeyboardInterrupt()}, "--base v1", 130, None, "interrupted"),
    ({}, "--bisect v1 v2", 0, None, "the first commit that is slower than v1: 12ab it"),
    ({}, "", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --base v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --head v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --out FILE", 2, None, NEITHER),
    ({}, "--base v1 --build make", 2, None, NO_CASES),
    ({}, "--base v1 --package mine", 2, None, NO_CASES),
    ({}, f"--base v1 --cases {HERE}", 2, None, NO_CASES),
    ({}, f"--base v1 --package my-own --cases {HERE}", 2, None, NO_CASES),
]


@pytest.mark.parametrize(("made", "options", "code", "verdict", "said"), ASKED)
def test_exit_code_and_verdict(
    made: dict[str, Any],
    options: str,
    code: int,
    verdict: str | None,
    said: str,
    monkeypatch: Any,
    command: Any,
) -> None:
    made_up(monkeypatch, **made)

    out, err = command("regression", *shlex.split(options), code=code)

    complaints = [line for line in err.splitlines() if line.startswith("reproduce: ")]
    if code == 0:
        assert complaints == []
        assert said in out
    else:
        (complaint,) = complaints
        assert said in complaint
    rows = [line.split() for line in out.splitlines() if line.startswith(CASE)]
    verdicts = [cells[-1] for cells in rows]
    assert verdicts == ([verdict] if verdict else [])


@pytest.mark.parametrize("style", ["text", "markdown", "csv", "json"])
def test_formats(style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """With `--slow-down`, the table in each output format says that a delay was planted.

    `--out` writes its file even if a case is slower.
    """
    made_up(monkeypatch, dict.fromkeys(NAMES, 1.2), base=["machinery never", CASE])
    file = tmp_path / "table.md"
    options = ["--slow-down", "0.1", "--format", style, "--out", str(file)]

    out, err = command("regression", "--base", "v1", *options, code=1)

    said = one_line(out)
    assert "WITH A PLANTED DELAY of 10%" in said
    assert err.endswith("all by wall clock\n")
    verdict, table = file.read_text().split("\n\n", 1)
    assert verdict.startswith("**slower than v1: ")
    assert table.startswith("## regression")
    assert (style == "markdown") == (table == out)
    if style in ("text", "markdown"):
        assert f"not in base (A): machinery never, {CASE}: ImportError: gone" in said
    if style == "json":
        *_, last = json.loads(out)["numbers"]
        assert last["row"] == "geometric mean"
        assert last["side"] == "B"
        assert last["verdict"] == "worse"
        assert last["ratio"] == pytest.approx(1.2, rel=0.01)


MINE = """
from reproduce.regression.timed import Case

def prepare():
    import mine
    return lambda: sum(range(mine.prepare.__code__.co_firstlineno))

CASES = [Case("machinery never", prepare)]
"""
FOREIGN = "--package mine --cases mine.txt --build 'mkdir src; cp mine.txt src/mine.py'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "ends", "code", "said"),
    [
        ("--base HEAD --restarts 8 --rounds 1", None, 0, "reproduce: "),
        ("--base HEAD --restarts 100000", signal.SIGINT, 130, "reproduce: interrupted\n"),
        ("--base HEAD --restarts 100000", signal.SIGTERM, 143, "reproduce: ended by SIGTERM\n"),
        ("--bisect HEAD~1 HEAD --restarts 100000", signal.SIGINT, 130, "reproduce: interrupted\n"),
        (f"--base HEAD --restarts 8 --rounds 1 {FOREIGN}", None, 0, "reproduce: "),
    ],
)
def test_for_real(
    asked: str,
    ends: signal.Signals | None,
    code: int,
    said: str,
    start: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Run `regression` in a repository with two commits and an uncommitted edit.

    The command leaves no files, even if an error or a signal ends the command.
    """
    root, copies = tmp_path / "repository", tmp_path / "tmp"
    copies.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("reproduce", "torchgpipe"):
        shutil.copytree(ROOT / package, root / package, ignore=ignore)
    (root / "mine.txt").write_text(MINE)
    for tag in ("1", "2", ""):
        with (root / "torchgpipe" / "__init__.py").open("a") as file:
            file.write("# changed\n")
        if tag:
            commit(root, tag)
    # No difference exceeds this threshold, so the machine's noise cannot make the test fail.
    options = ["--case", "machinery never", "--threshold", "1000", *shlex.split(asked)]

    process = start("-m", "reproduce", "regression", *options, root=root, TMPDIR=str(copies))
    if ends is not None:
        assert process.stderr.readline(), "a restart is done"
        process.send_signal(ends)
    out, err = process.communicate()  # waits for all processes that write to stderr, and children

    assert process.returncode == code, err
    assert "Traceback" not in err, err
    if ends is None:
        assert said not in err
        assert "B: the working tree (" in out
    else:
        assert err.endswith(said)
        assert not out
    assert not list(copies.glob("regression-*"))
