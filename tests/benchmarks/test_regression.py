"""The experiment: kinds of runs spread evenly, nothing finished lost, and a table that is made from the record."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regression as experiment
from benchmarks.circumstances import keep
from benchmarks.regression import order, prove, table
from reproduce.numbers.significance import Rule
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import Judgement, judge
from reproduce.regression.trees import Tree
from reproduce.tables.benchmark_block import benchmark_block

UNDER = {"when": "2026-01-02T03:04:05+00:00", "torch": "2", "python": "3", "cpu": "a CPU", "cores": 2, "load": 0.0,
         "revision": "0123456789", "dirty": False}  # fmt: skip


def measured(settings: Settings) -> Judgement:
    """Make up a job of steady samples, the head's slower by the delay."""
    draw = random.Random(settings.seed)
    ratio = 1 + settings.slow_down
    samples = Samples([[1.0] * 3] * 12, [[ratio * draw.uniform(0.999, 1.001) for _ in range(3)] for _ in range(12)])
    return judge({case: samples for case in settings.cases}, Rule())


@pytest.mark.parametrize(
    ("unchanged", "planted", "expected"),
    [(2, 1, [0.0, 0.1, 0.0]), (4, 2, [0.0, 0.1, 0.0, 0.0, 0.1, 0.0]), (1, 1, [0.0, 0.1])],
)
def test_the_kinds_are_spread(unchanged: int, planted: int, expected: list[float]) -> None:
    assert order(unchanged, planted) == expected


def test_only_what_is_missing_is_run() -> None:
    runs: list[dict[str, Any]] = [{"planted": 0.0, "kept": "from before"}]
    saved: list[int] = []
    prove(measured, [0.0, 0.1, 0.0], Settings(["a", "b"]), runs, lambda: saved.append(len(runs)))
    assert saved == [2, 3] and runs[0] == {"planted": 0.0, "kept": "from before"}
    assert [(run["planted"], run["worse"]) for run in runs[1:]] == [(0.1, ["a", "b", "all together"]), (0.0, [])]
    assert runs[1]["cases"]["a"]["base"] == [[1.0] * 3] * 12, "every sample"
    assert [len(restart) for restart in runs[1]["cases"]["a"]["head"]] == [3] * 12


def test_the_table_counts_what_the_record_says(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = []
    delays = order(4, 2)
    prove(measured, delays, Settings(["a", "b"]), runs, lambda: None)
    runs[0]["worse"] = ["b"]  # as if noise had
    what = {"restarts": 12, "rounds": 6, "alpha": 0.01, "threshold": 0.05, "delays": delays, "revision": "x"}
    keep(tmp_path / "kept.json", "regression", UNDER, {"what": what, "runs": runs})
    block = benchmark_block(tmp_path / "page.md", "kept", tmp_path)
    lines = {line.split("|")[1].strip(): line for line in block.splitlines() if line.startswith("|")}
    assert "0 of 4" in lines["a"] and "2 of 2" in lines["a"] and "1.10 (1.10-1.10)" in lines["a"]
    assert "1 of 4" in lines["b"] and "1 of 4" in lines["any of these: an alarm"]
    assert "0 of 4" in lines["all together"]
    assert block.startswith("4 runs on an unchanged tree and 2 with a planted delay")
    assert table({"what": what, "runs": runs}).startswith("4 runs")


def same_trees(base: str, head: str | None) -> contextlib.AbstractContextManager[tuple[Tree, Tree]]:
    """Compare what a user does: a revision, and the working tree."""
    assert (base, head) == ("HEAD", None)
    return contextlib.nullcontext((Tree(Path("base"), base, "1"), Tree(Path("head"), "the working tree", "1")))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tree for clean, and measure nothing."""
    monkeypatch.setattr(experiment, "circumstances", lambda: dict(UNDER))
    monkeypatch.setattr(experiment, "checkout", lambda: {"revision": UNDER["revision"], "dirty": False})
    monkeypatch.setattr(experiment, "trees", same_trees)
    monkeypatch.setattr(experiment, "measure", lambda base, head, settings, rule: measured(settings))


def test_from_start_to_end(clean: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    experiment.main(["--unchanged", "2", "--planted", "1", "--json", str(file)])
    out, err = capsys.readouterr()
    assert "any of these: an alarm" in out and "run 2 of 3, planted 10%" in err and "ALARM: machinery never" in err
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert len(json.loads(file.read_text())["runs"]) == 3


def test_it_goes_on_where_it_was_broken_off(
    clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text("the result before")
    command = ["--unchanged", "2", "--planted", "1", "--json", str(file)]
    calls: list[float] = []

    def pressed(base: object, head: object, settings: Settings, rule: Rule) -> Judgement:
        calls.append(settings.slow_down)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(settings)

    monkeypatch.setattr(experiment, "measure", pressed)
    with pytest.raises(SystemExit) as exit:
        experiment.main(command)
    assert exit.value.code == 130 and "interrupted; 1 runs are kept" in capsys.readouterr().err
    assert file.read_text() == "the result before", "until the new one is whole"
    with pytest.raises(SystemExit):
        experiment.main([*command, "--planted", "2"])
    assert "is of another revision or other settings" in capsys.readouterr().err
    experiment.main(command)
    assert calls == [0.0, 0.1, 0.1, 0.0] and len(json.loads(file.read_text())["runs"]) == 3


def test_a_tree_with_changes_is_refused(
    clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "circumstances", lambda: {**UNDER, "dirty": True})
    with pytest.raises(SystemExit) as exit:
        experiment.main(["--json", str(tmp_path / "x.json")])
    assert exit.value.code == 2 and "the tree has changes" in capsys.readouterr().err


@pytest.mark.parametrize("meanwhile", [{"dirty": True}, {"revision": "8"}])
def test_a_run_during_which_the_tree_changed_is_not_kept(
    meanwhile: dict[str, Any], clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = [experiment.checkout(), {**experiment.checkout(), **meanwhile}]
    monkeypatch.setattr(experiment, "checkout", lambda: states.pop(0))
    with pytest.raises(SystemExit, match=r"the tree is no longer 012345678 without changes; .*; 1 runs are kept"):
        experiment.main(["--unchanged", "2", "--planted", "1", "--json", str(tmp_path / "x.json")])
    assert len(json.loads((tmp_path / ".x.unfinished.json").read_text())["runs"]) == 1


def test_files_that_git_does_not_know_are_no_part_of_a_revision(
    clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = Tree(Path("base"), "HEAD", "1"), Tree(Path("head"), "the working tree", "1", dirty=True)
    monkeypatch.setattr(experiment, "trees", lambda base, head: contextlib.nullcontext(pair))
    with pytest.raises(SystemExit, match="files in torchgpipe that git does not know"):
        experiment.main(["--json", str(tmp_path / "x.json")])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A lone percent sign in an option's help would break it."""
    with pytest.raises(SystemExit) as exit:
        experiment.main(["--help"])
    assert exit.value.code == 0 and "with a delay of 10%" in " ".join(capsys.readouterr().out.split())
