"""regression: exit codes and tables for made-up samples, and one real run in a repository made from this tree."""

import contextlib
import json
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reproduce.cli.regression import WORKFLOW
from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import bisect
from reproduce.regression import main as asked
from reproduce.regression.cases import CASES, OVERLAP
from reproduce.regression.job import Settings
from reproduce.regression.trees import Project, Tree

from ..made import commit

NAMES = [case.name for case in CASES]
CASE = "U-Net GPipe"
HERE = shlex.quote(__file__)


def made_up(
    monkeypatch: pytest.MonkeyPatch,
    slower: dict[str, float] | None = None,
    ends: BaseException | None = None,
    **unable: list[str],
) -> None:
    """Replace trees, job and bisection: cases are slower by a factor, fail on a side, or the job ends with an error."""

    @contextlib.contextmanager
    def trees(base: str, head: str | None, project: Project) -> Iterator[tuple[Tree, Tree]]:
        yield (
            Tree(ROOT, base, "0" * 40),
            Tree(ROOT, head or "the working tree", "1" * 40, dirty=True),
        )

    def interleaved(base: Tree, head: Tree, settings: Settings) -> Iterator[dict[str, object]]:
        for case in settings.cases:
            sides = {side: "ImportError: gone" for side, cases in unable.items() if case in cases}
            if sides:
                yield {"case": case, "unable": sides}
                continue
            factor = (slower or {}).get(case, 1.0)
            for i in range(settings.restarts):
                steady = [0.01 * (1 + k / 1000) for k in range(settings.rounds)]
                noise = 1 + (-1) ** i * (i + 1) / 2000
                samples = {"base": steady, "head": [factor * noise * x for x in steady]}
                yield {"case": case, "restart": i, "samples": samples}
                if ends is not None:
                    raise ends

    monkeypatch.setattr(asked, "trees", trees)
    monkeypatch.setattr(asked, "interleaved", interleaved)
    monkeypatch.setattr(bisect, "bisected", lambda *asked: "12ab it")


def test_an_unchanged_tree_passes(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    made_up(monkeypatch)
    out, err = command("regression", "--base", "v1")
    said = " ".join(out.split())
    assert err == "restart 1 of 20 done\n" and out.startswith(
        "regression: time in ms; lower is better\n"
    )
    assert all(name in out for name in NAMES) and "worse" not in out.split("\n- ")[0]
    (mean,) = (line for line in out.splitlines() if line.startswith("geometric mean of 8"))
    assert mean.split()[4] == "1.00" and mean.endswith("~"), "it is judged, too"
    assert (
        "A: v1 (" in out
        and "git 0000000" in out
        and "B: the working tree (" in out
        and "git 1111111+" in out
    )
    assert (
        "20 restarts of both sides; in each, 8 pairs" in said
        and "0.01, is shared by 9 tests" in said
    )
    assert (
        "\nregression by wall clock: time in ms; lower is better\n" in out
        and "wall-clock times on two" in said
    )
    assert f"geometric mean of {len(OVERLAP)} " in said
    assert max(map(len, out.splitlines())) <= 80


# The made-up samples, the options, the exit code, the verdict on a case, the message.
ASKED: list[tuple[dict[str, Any], str, int, str | None, str]] = [
    ({"slower": {CASE: 1.1}}, "--base v1", 1, "worse", f"slower than v1: {CASE}"),
    ({"slower": {CASE: 1.015}}, "--base v1", 0, "~", ""),
    (
        {"slower": {CASE: 1.015}},
        "--base v1 --threshold 0.01",
        1,
        "worse",
        f"slower than v1: {CASE}",
    ),
    ({"slower": {CASE: 0.8}}, "--base v1", 0, "better", ""),
    ({"slower": dict.fromkeys(NAMES, 1.2)}, "--base v1", 1, "worse", f"{NAMES[0]}, {NAMES[1]}, "),
    ({"slower": {CASE: 1.1}}, "--base v1 --head v2 --case naive --case MACHINERY", 0, None, ""),
    (
        {"slower": {NAMES[1]: 1.1}},
        "--base v1 --restarts 8 --case always",
        1,
        None,
        f"slower than v1: {NAMES[1]}",
    ),
    (
        {},
        "--base v1 --case gpipe --case x",
        2,
        None,
        "--case x: no case's name contains it; there are machinery",
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
    *(
        ({}, wrong, 2, None, "give --base REV, or --bisect GOOD BAD, which takes no --head")
        for wrong in (
            "",
            *(f"--bisect v1 v2 {more}" for more in ("--base v1", "--head v1", "--markdown FILE")),
        )
    ),
    *(
        ({}, f"--base v1 {wrong}", 2, None, "give --package mypackage --cases bench/cases.py: ")
        for wrong in (
            "--build make",
            "--package mine",
            f"--cases {HERE}",
            f"--package my-own --cases {HERE}",
        )
    ),
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
    assert len(complaints) == (code != 0) and said in "".join(complaints or [out])
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(CASE)] == (
        [verdict] if verdict else []
    )


@pytest.mark.parametrize("style", ["text", "markdown", "csv", "json"])
def test_formats(style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """Each format says that a delay was planted. `--markdown` writes its file even if a case is slower."""
    made_up(monkeypatch, dict.fromkeys(NAMES, 1.2), base=["machinery never", CASE])
    file = tmp_path / "table.md"
    options = ["--slow-down", "0.1", "--format", style, "--markdown", str(file)]
    out, err = command("regression", "--base", "v1", *options, code=1)
    said = " ".join(out.split())
    assert "WITH A PLANTED DELAY of 10%" in said and err.endswith("all by wall clock\n")
    verdict, table = file.read_text().split("\n\n", 1)
    assert verdict.startswith("**slower than v1: ") and table.startswith("## regression")
    assert (style == "markdown") == (table == out)
    if style in ("text", "markdown"):
        assert f"not in base (A): machinery never, {CASE}: ImportError: gone" in said
    if style == "json":
        last = json.loads(out)["numbers"][-1]
        assert (last["row"], last["side"], last["verdict"]) == ("geometric mean", "B", "worse")
        assert last["ratio"] == pytest.approx(1.2, rel=0.01)


def test_the_workflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """This repository's own is as `init-ci` writes it, and another's has its own commands."""
    own = (ROOT / WORKFLOW).read_text()
    asked = shlex.split(own.splitlines()[0].removeprefix("# Written by: reproduce "))
    monkeypatch.setattr("sys.argv", ["reproduce", *asked])
    monkeypatch.chdir(tmp_path)
    command(*asked)
    assert WORKFLOW.read_text() == own and "Check before" in own
    assert "is there: change it by hand" in command(*asked, code=2)[1]
    WORKFLOW.unlink()
    Path("cases.py").touch()
    command("init-ci", "--package", "mine", "--cases", "cases.py", "--build", "make it")
    text = WORKFLOW.read_text()
    assert (
        "regression.md --package mine --cases cases.py --build 'make it'\n" in text
        and "Check before" not in text
    )


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
        ("--base HEAD --restarts 100000", signal.SIGTERM, 143, ""),
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
    """In a repository of this tree, with two commits and an edit. However it ends, it leaves no files or processes."""
    root, copies = tmp_path / "repository", tmp_path / "tmp"
    copies.mkdir()
    for package in ("reproduce", "torchgpipe"):
        shutil.copytree(
            ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (root / "mine.txt").write_text(MINE)
    for tag in ("1", "2", ""):
        with (root / "torchgpipe" / "__init__.py").open("a") as file:
            file.write("# changed\n")
        if tag:
            commit(root, tag)
    # No difference exceeds this threshold, so noise of the machine cannot fail the test.
    options = ["--case", "machinery never", "--threshold", "1000", *shlex.split(asked)]
    process = start("-m", "reproduce", "regression", *options, root=root, TMPDIR=str(copies))
    if ends is not None:
        assert process.stderr.readline(), "a restart is done"
        process.send_signal(ends)
    out, err = process.communicate()  # waits for all processes that write there, also children
    assert process.returncode == code and "Traceback" not in err, err
    assert (
        (said not in err and "B: the working tree (" in out)
        if ends is None
        else (err.endswith(said) and not out)
    )
    assert not list(copies.glob("regression-*"))
