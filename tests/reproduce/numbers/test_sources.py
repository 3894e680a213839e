"""Sides: records come from files, folders, pytest-benchmark and git revisions, and what is wrong is one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.numbers.sources import Side, load_side
from reproduce.records.record import Record, Result, save

Make = Callable[..., Record]
MakeRow = Callable[..., Result]
FOREIGN = Path(__file__).parents[1] / "records" / "data" / "pytest-benchmark.json"


def rows(side: Side) -> list[str]:
    return [entry.result.row for entry in side.entries]


@pytest.fixture
def folder(tmp_path: Path, record: Make, row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git checkout with an old and a new run in results/measured, of which a revision has the old one."""
    monkeypatch.chdir(tmp_path)
    measured = tmp_path / "results" / "measured"
    measured.mkdir(parents=True)
    save(record(row("x", [2.0]), row("y", [2.0])), measured / "old.json")

    def git(*command: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "--no-verify", "-m", "old")
    git("tag", "before")
    save(record(row("x", [1.0]), started="2021-01-01T00:00:00Z"), measured / "new.json")
    return measured


@pytest.mark.parametrize(
    ("name", "expected", "superseded"),
    [
        ("results/measured/old.json", ["x", "y"], 0),
        ("results/measured", ["y", "x"], 1),
        ("before", ["x", "y"], 0),
        ("HEAD", ["x", "y"], 0),
        ("before:results/measured", ["x", "y"], 0),
        ("before:results/measured/old.json", ["x", "y"], 0),
        (str(FOREIGN), ["test_one[1]", "test_two"], 0),
    ],
)
def test_a_side_has_each_row_once(folder: Path, name: str, expected: list[str], superseded: int) -> None:
    side = load_side("A", name)
    assert (rows(side), side.superseded) == (expected, superseded)


def test_the_newest_run_counts(folder: Path) -> None:
    times = {entry.result.row: entry.result.samples["step_time"][0] for entry in load_side("A", str(folder)).entries}
    assert times == {"x": 1.0, "y": 2.0}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere", Error, "nowhere: no such file or folder, and no git revision here; name a record, a folder or"),
        ("", Error, "no such file or folder"),
        (":results", Error, "no such file or folder"),
        ("-rf", Error, "-rf: no such file or folder"),
        ("results", Error, "results: no record (*.json) in this folder; there are some in results/measured"),
        (
            "HEAD:docs",
            Error,
            "HEAD:docs: that revision holds no record (*.json) in docs; name a place as HEAD:FOLDER",
        ),
        ("empty", Error, "empty: no record (*.json) in this folder"),
        ("text.txt", Error, "text.txt: not JSON: invalid character (byte 4)"),
        ("broken", Error, 'broken/x.json: not a record (its "format" is not "torchgpipe-reproduce")'),
    ],
)
def test_what_is_wrong_is_told(folder: Path, name: str, error: type[Exception], message: str) -> None:
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/x.json").write_text("{}")
    Path("text.txt").write_text("text")
    with pytest.raises(error) as caught:
        load_side("A", name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_git_a_name_is_refused_just_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Error, match="HEAD: no such file or folder"):
        load_side("A", "HEAD")


def test_pytest_benchmark() -> None:
    one, two = load_side("A", str(FOREIGN)).entries
    assert one.result.config == {"benchmark": "tests/test_it.py::test_one[1]", "n": 1}
    assert one.result.experiment == "tests/test_it.py"
    assert one.result.samples == {"time": [0.5, 0.25, 0.75]}
    assert two.result.samples == {"time": [2.0]}, "without --benchmark-save-data there is only the median"
    run = one.record.run
    assert run is not None and run.seed is None and run.machine.cpu == "a CPU" and run.machine.cores == 4
    assert run.git is not None and run.git.revision == "abc" and run.git.dirty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmarks": 3}, "benchmarks: Expected `array`, got `int`"),
        (
            {"benchmarks": [{"fullname": "f", "name": "n", "stats": {}}]},
            "benchmarks[0].stats: Object missing required field `median`",
        ),
        ({"benchmarks": [{"fullname": 1}]}, "benchmarks[0].fullname: Expected `str`, got `int`"),
        ({"machine_info": []}, "machine_info: Expected `object`, got `array`"),
    ],
)
def test_broken_pytest_benchmark_files_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps({**json.loads(FOREIGN.read_text()), **change}))
    with pytest.raises(Error) as caught:
        load_side("A", str(path))
    assert str(caught.value) == f"{path}: {message}"
