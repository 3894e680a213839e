"""Tests of the command `regression`, which measures two revisions in turn, and of `init-ci`.

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

from reproduce.cli.regression import WORKFLOW
from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import bisect, gates
from reproduce.regression import main as asked
from reproduce.regression.cases import CASES
from reproduce.regression.gates import Found
from reproduce.regression.job import Settings
from reproduce.regression.trees import Project, Tree, Trees

from ..made import commit, one_line

NAMES = [case.name for case in CASES]
CASE = "U-Net GPipe"
HERE = shlex.quote(__file__)


def made_up(
    monkeypatch: pytest.MonkeyPatch,
    slower: dict[str, float] | None = None,
    ends: BaseException | None = None,
    since: float = 1.0,
    busy: bool = False,
    lost: str | None = None,
    **unable: list[str],
) -> None:
    """Replace the gates, and the measuring of the revisions, by made-up lines and samples.

    Args:
        monkeypatch: The fixture that replaces the functions.
        slower: For each case in which the head is slower, the factor.
        ends: The error that ends the measuring.
        since: By which factor all cases are slower than in the revision of `--also`.
        busy: Whether other programs use the cores.
        lost: The gate that finds a loss.
        unable: For each revision (`base` or `head`), the cases that it cannot run.
    """

    @contextlib.contextmanager
    def trees(base: str, head: str | None, project: Project, also: str | None) -> Iterator[Trees]:
        ours = head or "the working tree"
        second = None if also is None else Tree(ROOT, also, "2" * 40)
        yield Trees(Tree(ROOT, base, "0" * 40), Tree(ROOT, ours, "1" * 40, dirty=True), second)

    def judged_by(module: str, base: Tree, head: Tree) -> Found:
        name = module.rpartition(".")[2]
        return Found(name, "worse" if name == lost else "~", [f"{name} says so"])

    def interleaved(versions: Trees, settings: Settings) -> Iterator[dict[str, object]]:
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
                if versions.also is not None:
                    samples["also"] = [seconds / since for seconds in changed]
                yield {"case": case, "restart": i, "samples": samples, "busy": busy}
                if ends is not None:
                    raise ends

    monkeypatch.setattr(asked, "trees", trees)
    monkeypatch.setattr(asked, "interleaved", interleaved)
    monkeypatch.setattr(asked, "judged_by", judged_by)
    monkeypatch.setattr(bisect, "bisected", lambda *asked: "12ab it")


def test_an_unchanged_tree_passes(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    made_up(monkeypatch)

    out, err = command("regression", "--base", "v1", "--also", "v0")

    assert err == "the gate counts runs\n"
    assert out.startswith("regression: time in ms; lower is better\n")
    for name in NAMES:
        assert f"\n{name.split()[0]}" in out
    table, _, notes = out.partition("\n- ")
    assert "worse" not in table
    lines = table.splitlines()
    _, _, heading, _, *rows = lines
    assert heading.split() == ["row", "A", "B", "B/A", "interval", "verdict", "B/C", "verdict"]
    first = [" ".join(row.split()) for row in rows[:3]]
    assert first == ["counts ~", "meeting ~", "by wall clock"]
    means = [line.split() for line in rows if line.startswith("geometric mean of")]
    assert [cells[-5:] for cells in means] == [["1.00", "1.00-1.00", "~", "1.00", "~"]] * 2
    for said in (
        "A: v1 (git 0000000)",
        "B: the working tree (git 1111111+)",
        "C: v0 (git 2222222)",
        "counts: counts says so",
        "20 restarts of all sides; in each, 8 pairs",
        f"0.01, is shared by {2 * (len(NAMES) + 2)} tests",
        "wall-clock times on two",
        "more than 2 % apart, by wall clock 5 % (beside C 10 %, and 25 %)",
    ):
        assert said in one_line(notes)
    assert out.endswith("\n\nnot worse than v1, nor than v0\n"), "the text ends with the verdict"
    assert max(map(len, out.splitlines())) <= 80


def slower(factor: float, *cases: str) -> dict[str, Any]:
    return {"slower": dict.fromkeys(cases or [CASE], factor)}


FIRST, SECOND, *_ = NAMES
ALWAYS = "machinery always"
WORSE = f"worse than v1: {CASE}"
NEITHER = "give either --base REV, or --bisect GOOD BAD without --head, --also, --gate"
NO_CASES = "as in --package mypackage --cases bench/cases.py; got "
# The made-up samples, the options, the exit code, the verdict on a case, and the message.
ASKED: list[tuple[dict[str, Any], str, int, str | None, str]] = [
    (slower(1.1), "--base v1", 1, "worse", WORSE),
    (slower(1.015), "--base v1", 0, "~", ""),
    (slower(1.015), "--base v1 --threshold 0.01", 1, "worse", WORSE),
    (slower(0.8), "--base v1", 0, "better", ""),
    (slower(1.2, *NAMES), "--base v1", 1, "worse", f"worse than v1: {FIRST}, {SECOND}, "),
    (slower(1.1), "--base v1 --head v2 --case naive --case MACHINERY", 0, None, ""),
    (
        slower(1.1, ALWAYS),
        "--base v1 --restarts 11 --case always",
        1,
        None,
        f"worse than v1: {ALWAYS}",
    ),
    (
        {},
        "--base v1 --case gpipe --case x",
        2,
        None,
        "--case x: no case has this text in its name; the cases are ranks",
    ),
    (
        {},
        "--base v1 --restarts 5",
        2,
        None,
        f"with {len(NAMES)} cases and --alpha 0.01, nothing could be called significant",
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
    ({"since": 1.05}, "--base v1 --also v0", 0, "~", "not worse than v1, nor than v0"),
    ({"since": 1.15}, "--base v1 --also v0", 1, "worse", "worse than v0: "),
    ({"since": 1.15}, "--base v1 --also v0 --also-threshold 0.2", 0, "~", ""),
    ({"busy": True}, "--base v1", 2, "~", "other programs used the cores, which may have hidden"),
    ({"busy": True}, "--base v1 --case U-Net", 0, "~", "not worse than v1"),
    ({"busy": True} | slower(1.1), "--base v1", 1, "worse", WORSE),
    ({"lost": "counts"}, "--base v1", 1, "~", "worse than v1: counts"),
    ({"lost": "meeting"}, "--base v1 --gate meeting", 1, None, "worse than v1: meeting"),
    ({"lost": "meeting"}, "--base v1 --gate counts", 0, None, "not worse than v1"),
    ({"lost": "meeting"}, "--base v1 --gate times", 0, "~", "not worse than v1"),
    ({}, "--base v1 --gate size", 2, None, "no such gate; it has counts, meeting, times"),
    ({}, "--base v1 --gate counts --case U-Net", 2, None, "--case chooses what is timed"),
    ({"ends": Error("it broke")}, "--base v1", 2, None, "it broke"),
    ({"ends": KeyboardInterrupt()}, "--base v1", 130, None, "interrupted"),
    ({}, "--bisect v1 v2", 0, None, "the first commit that is slower than v1: 12ab it"),
    ({}, "", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --base v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --head v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --also v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --gate times", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --markdown FILE", 2, None, NEITHER),
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
    if out and "--bisect" not in options:
        assert complaints == [], "the verdict is at the end of the text"
        *_, conclusion = out.split("\n\n")
        assert said in one_line(conclusion)
    elif code == 0:
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

    `--markdown` writes its file even if a case is slower.
    """
    made_up(monkeypatch, dict.fromkeys(NAMES, 1.2), base=["machinery never", CASE])
    file = tmp_path / "table.md"
    options = ["--slow-down", "0.1", "--format", style, "--markdown", str(file)]

    out, err = command("regression", "--base", "v1", *options, code=1)

    said = one_line(out)
    conclusion = f"worse than v1: {FIRST}, "
    written = file.read_text()
    assert written.startswith("## regression")
    assert written.splitlines()[-1].startswith(f"**{conclusion}")
    assert (style == "markdown") == (written == out)
    if style in ("text", "markdown"):
        assert "WITH A PLANTED DELAY of 10%" in said
        assert f"not in base (A): machinery never, {CASE}: ImportError: gone" in said
    else:
        assert f"reproduce: {conclusion}" in err
    if style == "json":
        found = json.loads(out)
        assert found["conclusion"].startswith(conclusion)
        *_, last = found["numbers"]
        assert last["row"] == "all together"
        assert last["side"] == "B"
        assert last["verdict"] == "worse"
        assert last["ratio"] == pytest.approx(1.2, rel=0.01)


GATE = """
import sys
from package import lines, code
print("\\n".join(lines))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("base", "head", "verdict", "said"),
    [
        ((0, ["well"]), (0, ["all well"]), "~", ["all well"]),
        ((0, ["well"]), (1, ["lost", "more lost"]), "worse", ["lost", "more lost"]),
        ((1, ["lost"]), (1, ["lost"]), "~", ["what it finds is the same in old", "lost"]),
        ((1, ["lost"]), (1, ["lost", "more lost"]), "worse", ["lost", "more lost"]),
        ((2, ["broken"]), (1, ["lost"]), "worse", ["lost"]),
    ],
)
def test_a_gate_judges_the_new_version_beside_the_old_one(
    base: Any, head: Any, verdict: str, said: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    found = gates.judged("a.gate", *versions(base, head, tmp_path, monkeypatch))
    assert found == ("gate", verdict, said)


def test_a_gate_that_cannot_judge(tmp_path: Path, monkeypatch: Any) -> None:
    """If the package does not run, nothing is timed: it could wait for ever."""
    made = versions((0, []), (2, ["", "gate: the package does not run"]), tmp_path, monkeypatch)
    with pytest.raises(Error, match=r"^gate: the package does not run$"):
        gates.judged("a.gate", *made)


def versions(base: Any, head: Any, folder: Path, monkeypatch: Any) -> tuple[Tree, Tree]:
    """Make two versions of a package, for which a gate prints lines and has an exit code."""
    monkeypatch.setattr(gates, "ROOT", folder)
    (folder / "a").mkdir()
    (folder / "a" / "gate.py").write_text(GATE)
    made = []
    for name, (code, lines) in (("old", base), ("new", head)):
        (folder / name).mkdir()
        text = f"code = {code}\nlines = {lines}\n"
        (folder / name / "package.py").write_text(text)
        made.append(Tree(folder / name, name, None))
    old, new = made
    return old, new


def test_the_workflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """`init-ci` writes a CI workflow, in which a gate comes first and then `regression`."""
    asked = ["init-ci", "--set-up", "make setup", "--gate", "make gate"]
    monkeypatch.setattr("sys.argv", ["reproduce", *asked])
    monkeypatch.chdir(tmp_path)

    command(*asked)

    text = WORKFLOW.read_text()
    assert text.startswith("# Written by: reproduce init-ci --set-up 'make setup'")
    assert text.index("make gate") < text.index("reproduce regression --base 'HEAD^1'")
    _, err = command(*asked, code=2)
    assert "exists already: change it by hand" in err

    WORKFLOW.unlink()
    Path("cases.py").touch()
    command("init-ci", "--package", "mine", "--cases", "cases.py", "--build", "make it")

    text = WORKFLOW.read_text()
    assert "regression.md --package mine --cases cases.py --build 'make it'\n" in text
    assert "Check before" not in text


def test_the_workflow_of_this_repository_has_a_second_base() -> None:
    own = (ROOT / WORKFLOW).read_text()
    assert "reproduce regression --base 'HEAD^1' $ALSO --markdown regression.md" in own


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
        ("--base HEAD --also HEAD~1 --restarts 9 --rounds 1", None, 0, "reproduce: "),
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
    wide = ["--threshold", "1000", "--also-threshold", "1000"]
    options = ["--case", "machinery never", *wide, *shlex.split(asked)]

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
