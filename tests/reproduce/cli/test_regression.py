"""Tests of the command `regression`, which checks whether one git revision is slower than another.

These tests replace the measurements by made-up ones, and check exit codes and tables. The tests in
`test_regression_for_real.py` run the command with real measurements.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.regression import bisect
from reproduce.regression import main as asked
from reproduce.regression.cases import CASES
from reproduce.regression.gates import Found
from reproduce.regression.job import Settings
from reproduce.regression.trees import Project, Tree, Trees

from ..made import one_line

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
    """Replace what `regression` measures by fakes: the times, and the gates (checks without times).

    Args:
        monkeypatch: The fixture that replaces the functions.
        slower: For each case that is slower in the new revision: the ratio of its times, new / old.
        ends: An error that the fake timing raises after its first samples.
        since: The ratio of the times of all cases, new revision / the revision that the option
            `--also` names.
        busy: Whether other programs use the cores during the timing.
        lost: The name of the gate that reports a loss of speed.
        unable: The cases that the old revision (`base`) or the new revision (`head`) cannot run.
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
    assert [[cells[-5], *cells[-3:]] for cells in means] == [["1.00", "~", "1.00", "~"]] * 2
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
        "--case x: no case (timed work) has this text in its name; the names of the cases are",
    ),
    (
        {},
        "--base v1 --restarts 5",
        2,
        None,
        f"with {len(NAMES)} cases and --alpha 0.01, no difference could be significant",
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
    ({}, "--base v1 --gate counts --slow-down 0.1", 2, None, "--slow-down delays what is timed"),
    ({"ends": Error("it broke")}, "--base v1", 2, None, "it broke"),
    ({"ends": KeyboardInterrupt()}, "--base v1", 130, None, "interrupted"),
    ({}, "--bisect v1 v2", 0, None, "the first commit that is slower than v1: 12ab it"),
    ({}, "", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --base v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --head v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --also v1", 2, None, NEITHER),
    ({}, "--bisect v1 v2 --gate times", 2, None, NEITHER),
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


def test_another_repository_needs_a_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any
) -> None:
    """Check that `regression` does not judge torchgpipe where the user means another package."""
    made_up(monkeypatch)
    monkeypatch.chdir(tmp_path)
    out, err = command("regression", "--base", "v1", code=2)
    assert out == ""
    where = f"{tmp_path} is not in torchgpipe's repository, {ROOT}: go there to judge torchgpipe"
    asked = "or name the package to judge, as in --package mypackage --cases bench/cases.py"
    assert err == f"reproduce: {where}, {asked}\n"


@pytest.mark.parametrize(
    ("clock", "other"), [("CPU time", "wall clock"), ("wall clock", "CPU time")]
)
def test_a_clock_for_all_cases(
    clock: str, other: str, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    made_up(monkeypatch)
    option, *_ = clock.lower().split()
    out, _ = command("regression", "--base", "v1", "--clock", option)
    table, _, _ = out.partition("\n- ")
    assert f"by {clock}" in table
    assert f"by {other}" not in table


@pytest.mark.parametrize("style", ["text", "markdown", "csv", "json"])
def test_formats(style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    """Check each output format, with a delay that `--slow-down` adds to the new revision.

    The text and the Markdown must name this delay. The option `--out` must write its file even if a
    case is slower.
    """
    made_up(monkeypatch, dict.fromkeys(NAMES, 1.2), base=["machinery never", CASE])
    file = tmp_path / "table.md"
    options = ["--slow-down", "0.1", "--format", style, "--out", str(file)]

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


def test_the_workflow_of_this_repository_has_a_second_base() -> None:
    own = (ROOT / ".github" / "workflows" / "regression.yml").read_text()
    assert "reproduce regression --base 'HEAD^1' $ALSO --out regression.md" in own
