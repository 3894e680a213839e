"""The experiment: kinds of runs in turn, nothing finished lost, and a table that is made from the record."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from benchmarks.gates import regression as experiment
from benchmarks.gates.regression import ALARM, DELAYS, table
from reproduce.error import Error
from reproduce.machine.git import Git
from reproduce.numbers.significance import Rule
from reproduce.records.record import load
from reproduce.regression.job import Samples, Settings
from reproduce.regression.judge import RULE, Judgement, judge
from reproduce.regression.trees import Tree

CLEAN = Git("0123456789", dirty=False)


def measured(settings: Settings) -> Judgement:
    """Make up a job of fairly steady samples, the head's slower by the delay."""
    draw = random.Random(settings.seed)

    def side(level: float) -> list[list[float]]:
        return [[level * draw.uniform(0.999, 1.001) for _ in range(3)] for _ in range(12)]

    samples = Samples(side(1.0), side(1 + settings.slow_down))
    return judge({case: samples for case in settings.cases}, RULE)


class Machine:
    """Stands in for what takes long: the tree is clean, unless a test changes that, and a run takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.command = ["--runs", "3", "--json", str(file)]
        self.runs: list[float] = []
        self.ends_at: dict[int, BaseException] = {}
        self.revisions: list[Git] = []
        self.head = Tree(Path("head"), "the working tree", "1")
        monkeypatch.setattr("reproduce.run.recorder.checkout", lambda: CLEAN)
        monkeypatch.setattr(experiment, "checkout", lambda: self.revisions.pop(0) if self.revisions else CLEAN)
        monkeypatch.setattr(experiment, "trees", self.trees)
        monkeypatch.setattr(experiment, "measure", self.measure)
        monkeypatch.setattr(experiment, "DRAWS", 5)

    def trees(self, base: str, head: str | None) -> contextlib.AbstractContextManager[tuple[Tree, Tree]]:
        """Compare what a user does: a revision, and the working tree."""
        assert (base, head) == ("HEAD", None)
        return contextlib.nullcontext((Tree(Path("base"), base, "1"), self.head))

    def measure(self, base: Tree, head: Tree, settings: Settings, rule: Rule) -> Judgement:
        self.runs.append(settings.slow_down)
        if (ending := self.ends_at.pop(len(self.runs), None)) is not None:
            raise ending
        return measured(settings)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "x.json")


def test_from_start_to_end(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment.main(machine.command)
    record = load(tmp_path / "x.json")
    assert table(record) in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert [(run.row, run.config["planted"]) for run in record.results] == [
        ("run 1", 0), ("run 2", 0.03), ("run 3", 0), ("0%", 0), ("3%", 0.03)
    ]  # fmt: skip
    assert record.results[1].values["cases"]["machinery never"].keys() == {"ratio", "low", "high", "p"}
    record.results[0].values["worse"].append("U-Net naive")  # as if noise had
    lines = {line.split("|")[1].strip(): line for line in table(record, "pipe").splitlines() if line.startswith("|")}
    assert "0 of 2, 0 of 5" in lines["machinery never"] and "1 of 1, 5 of 5" in lines["machinery never"]
    ratio = record.results[1].values["cases"]["machinery never"]["ratio"]
    assert f"{ratio:.3f} ({ratio:.3f}-{ratio:.3f})" in lines["machinery never"]
    assert "1 of 2" in lines["U-Net naive"] and "1 of 2" in lines[ALARM]


@pytest.mark.parametrize(("ending", "code"), [(KeyboardInterrupt(), 130), (Error("it ended"), 1)], ids=repr)
def test_it_goes_on_where_it_was_broken_off(
    ending: BaseException, code: int, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "x.json").write_text("the result before")
    machine.ends_at[2] = ending
    with pytest.raises(SystemExit) as exit:
        experiment.main(machine.command)
    unfinished = load(tmp_path / ".x.unfinished.json")
    assert exit.value.code == code and len(unfinished.results) == 1
    assert unfinished.run is not None and unfinished.run.state == "interrupted"
    assert (tmp_path / "x.json").read_text() == "the result before", "until the new one is whole"
    with monkeypatch.context() as stricter, pytest.raises(SystemExit):
        stricter.setattr(experiment, "RULE", Rule(0.02))
        experiment.main(machine.command)
    assert "is of another revision or other settings" in capsys.readouterr().err
    experiment.main([*machine.command, "--runs", "4"])
    assert machine.runs == [0.0, 0.03, *DELAYS[1:]]
    kept = [one.row for one in load(tmp_path / "x.json").results]
    assert kept == [*(f"run {k}" for k in range(1, 5)), "0%", "3%", "5%"]


def test_a_tree_with_changes_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether git knows the files that changed or not: a revision is to be proved."""
    machine.head = Tree(Path("head"), "the working tree", "1", dirty=True)
    with pytest.raises(SystemExit, match="2"):
        experiment.main(machine.command)
    monkeypatch.setattr("reproduce.run.recorder.checkout", lambda: Git(CLEAN.revision, dirty=True))
    with pytest.raises(SystemExit, match="2"):
        experiment.main(machine.command)
    assert not machine.runs


@pytest.mark.parametrize("meanwhile", [Git(CLEAN.revision, dirty=True), Git("8", dirty=False)])
def test_a_run_during_which_the_tree_changed_is_not_kept(meanwhile: Git, machine: Machine, tmp_path: Path) -> None:
    machine.revisions = [CLEAN, meanwhile]
    with pytest.raises(SystemExit):
        experiment.main(machine.command)
    assert len(load(tmp_path / ".x.unfinished.json").results) == 1
