"""Sides: records come from files, folders, pytest-benchmark and git revisions, and what is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.error import Error
from reproduce.numbers.sources import load_side
from reproduce.records.record import save

from ..made import record, row
from ..repository import commit

FOREIGN = Path(__file__).parents[1] / "records" / "data" / "pytest-benchmark.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git checkout with an old and a new run in results/measured, of which a revision has the old one."""
    monkeypatch.chdir(tmp_path)
    measured = tmp_path / "results" / "measured"
    measured.mkdir(parents=True)
    save(record(row("x", [2.0]), row("y", [2.0])), measured / "old.json")
    commit(tmp_path, "before")
    save(record(row("x", [1.0]), started="2021-01-01T00:00:00Z"), measured / "new.json")
    return measured


@pytest.mark.parametrize(
    ("name", "rows", "superseded"),
    [
        ("results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
        ("results/measured", {"y": 2.0, "x": 1.0}, 1),  # the newest run's
        ("before", {"x": 2.0, "y": 2.0}, 0),
        ("HEAD:results/measured", {"x": 2.0, "y": 2.0}, 0),
        ("before:results/measured/old.json", {"x": 2.0, "y": 2.0}, 0),
    ],
)
def test_a_side_has_each_row_once(folder: Path, name: str, rows: dict[str, float], superseded: int) -> None:
    side = load_side("A", name)
    steps = {entry.result.row: entry.result.samples["step_time"] for entry in side.entries}
    assert (steps, side.superseded) == ({row: [seconds] for row, seconds in rows.items()}, superseded)


NO_SUCH = "no such file or folder, and no git revision here; name a record, a folder or a revision"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", f": {NO_SUCH}"),
        (":results", f":results: {NO_SUCH}"),
        ("results", "results: no record (*.json) in this folder; there are some in results/measured"),
        ("HEAD:docs", "HEAD:docs: that revision holds no record (*.json) in docs; name a place as HEAD:FOLDER"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(folder: Path, name: str, message: str) -> None:
    with pytest.raises(Error) as caught:
        load_side("A", name)
    assert str(caught.value) == message


def test_without_git_a_name_is_refused_just_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Error, match="HEAD: no such file or folder"):
        load_side("A", "HEAD")


def test_pytest_benchmark() -> None:
    one, two = load_side("A", str(FOREIGN)).entries
    assert (one.result.row, two.result.row) == ("test_one[1]", "test_two")
    assert one.result.config == {"benchmark": "tests/test_it.py::test_one[1]", "n": 1}
    assert one.result.experiment == "tests/test_it.py"
    assert one.result.samples == {"time": [0.5, 0.25, 0.75]}
    assert two.result.samples == {"time": [2.0]}, "without --benchmark-save-data there is only the median"
    run = one.record.run
    assert run is not None and run.seed is None and run.machine.cpu == "a CPU" and run.machine.cores == 4
    assert run.git is not None and run.git.revision == "abc" and run.git.dirty
