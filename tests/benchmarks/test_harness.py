"""The harness: options, and that nothing finished is lost, whatever ends a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import Found, command, keep, start
from reproduce.error import Error
from reproduce.records.record import Record, Result, load


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rounds 0", "--rounds: 0 is not a whole number of at least 1"),
        ("--steps x", "--steps: x is not a whole number of at least 1"),
    ],
)
def test_what_every_benchmark_refuses(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("overlap", "A question.", rounds=2, steps=3).parse_args(line.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def begun(path: Path | None, **more: Any) -> Record:
    options = command("overlap", "A question.").parse_args([] if path is None else ["--json", str(path)])
    vars(options).update(more)
    return start(options, "overlap", "a title", {"time": "s"}, devices=2)


def test_a_record_says_where_and_how_but_no_paths(tmp_path: Path) -> None:
    run = begun(tmp_path / "new" / "one.json", against=Path("/somewhere"), chunks=[2, 4]).run
    assert run is not None and run.state == "running" and run.machine.cores >= 1 and run.versions["torch"]
    assert run.settings["chunks"] == [2, 4] and "freed_memory" in run.settings
    assert torch.get_num_threads() == run.threads_per_device == 1
    assert not {"json", "against"} & run.settings.keys() and str(tmp_path) not in str(run.command)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--json .*file: cannot be written"):
        begun(tmp_path / "file" / "one.json")


# What ends a benchmark after its first case, the exit code, and the record's state.
ENDS: dict[str, tuple[BaseException | None, int | None, str]] = {
    "nothing": (None, None, "finished"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "interrupted"),
    "a child": (Error("the measuring process ended"), 1, "interrupted"),
    "a bug": (ZeroDivisionError(), None, "running"),
}


@pytest.mark.parametrize(("ending", "code", "state"), ENDS.values(), ids=ENDS)
def test_what_is_finished_is_kept(
    ending: BaseException | None, code: int | None, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    states: list[str] = []

    def found() -> Found:
        yield [Result("case", "way", "measured", samples={"time": [1.0]})]
        states.append(json.loads(path.read_text())["run"]["state"])
        if ending is not None:
            raise ending
        yield [Result("case", "way", "measured", samples={"time": [4.0, 1.0, 2.0]}, values={"other": 3})]

    try:
        keep(begun(path), path, found(), 2, lambda record: f"{len(record.results)} results")
        assert ending is None
    except (SystemExit, ZeroDivisionError) as error:
        assert getattr(error, "code", None) == code and ending is not None
    record = load(path)
    assert states == ["running"] and record.run is not None and record.run.state == state
    summary = {"time": 1.0, "spread": {"time": [1.0, 1.0, 1]}}
    if ending is None:
        summary = {"other": 3, "time": 2.0, "spread": {"time": [1.0, 4.0, 3]}}
    assert [(result.samples, result.values) for result in record.results] == [({}, summary)]
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]
    if state != "running":
        assert capsys.readouterr().out == "1 results\n"


def test_without_a_result_no_file_is_touched(tmp_path: Path) -> None:
    def found() -> Found:
        raise Error("what it is")
        yield []

    with pytest.raises(SystemExit):
        keep(begun(tmp_path / "one.json"), tmp_path / "one.json", found(), 1, str)
    assert not list(tmp_path.iterdir())
