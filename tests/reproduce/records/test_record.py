"""Records: they come back as they were, are replaced whole or not at all, and foreign files are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import Record, Result, hardware_name, load, save

from ..made import RUN

FULL_RUN = replace(
    RUN,
    device="cuda",
    threads_per_device=None,
    machine=Machine("Linux", "a CPU", 4, 8, None, [Gpu("a GPU", 1 << 34, power_limit=250.0)]),
    versions={"torch": "2.11.0", "torchvision": None},
    git=Git("abc", dirty=True),
    load=[0.5, 0.25, 1.0],
    settings={"amoebanet-speed": {"warmup": 1}},
)
TIMED = Result("e", "r", "measured", "small", "cpu", {"balance": [1, 2]}, over="r", samples={"step_time": [0.1, 1e-9]})
FAILED = Result("e", "s", "failed", reason='RuntimeError: "quoted" ünïcode\n[1,\n 2]')
RECORD = Record("name", "Title", "measured", {"step_time": "s"}, [TIMED, FAILED], run=FULL_RUN)


def predicted(**changes: object) -> Record:
    return replace(RECORD, kind="predicted", results=[replace(FAILED, status="predicted")], **changes)


@pytest.mark.parametrize(
    "record",
    [RECORD, replace(RECORD, run=None, results=[]), replace(RECORD, discrepancies=[FAILED]),
     replace(RECORD, results=[TIMED, replace(TIMED, status="emulated", emulated=True),
                              replace(FAILED, emulated=True)]),
     predicted(hardware={"name": "p40x8", "devices": 8})],
)  # fmt: skip
def test_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    save(record, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record


def test_is_written_for_people(tmp_path: Path) -> None:
    timed = replace(TIMED, samples={"step_time": [0.1, 1e-9, 2 / 3], "loss": [1.5] * 40})
    save(replace(RECORD, results=[timed, FAILED]), tmp_path / "r.json")
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert lines[1:3] == [' "format": "torchgpipe-reproduce",', ' "version": 3,']
    assert '    "step_time": [0.1, 1e-09, 0.6666666667],' in lines, "with ten digits"
    assert f'    "loss": [{", ".join(["1.5"] * 40)}]' in lines, "a list of values stands on one line"
    assert '   "config": {"balance": [1, 2]},' in lines, "and so does what fits one"
    assert any('{"experiment": "e", "row": "s", "status": "failed", "reason": ' in line for line in lines)
    assert max(map(len, lines)) > 120 and sum(len(line) > 120 for line in lines) == 1
    assert not any("scale" in line and '"s"' in line for line in lines), "what is not there is left out"


@pytest.mark.parametrize(
    ("row", "record", "expected"),
    [("h100", "p40x8", "h100"), (None, "p40x8", "p40x8"), ("h100", None, "h100"), (None, None, None), (None, 3, None)],
)
def test_which_hardware_a_row_was_predicted_with(row: str | None, record: object, expected: str | None) -> None:
    result = replace(FAILED, hardware=row)
    assert hardware_name(replace(RECORD, hardware=record and {"name": record}), result) == expected


@pytest.mark.parametrize(("owner", "step"), [(Path, "open"), (os, "fsync"), (os, "replace")])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_kill_leaves_the_old_file(
    owner: object, step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    save(RECORD, tmp_path / "r.json")
    with monkeypatch.context() as broken, pytest.raises((Error, KeyboardInterrupt)):
        broken.setattr(owner, step, fail)
        save(replace(RECORD, title="new"), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == RECORD
    assert os.listdir(tmp_path) == ["r.json"], "nothing is left behind"


@pytest.mark.parametrize(
    ("record", "name", "message"),
    [
        (RECORD, "none/r.json", "none/r.json: cannot be written (No such file or directory)"),
        (replace(RECORD, results=[replace(TIMED, samples={"x": [float("nan")]})]), "r.json", "Out of range float"),
        (replace(RECORD, results=[TIMED, TIMED]), "r.json", "results[1]: 'r' of e is in results[0] already"),
        (predicted(), "r.json", "results[0].hardware: missing"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(record: Record, name: str, message: str, tmp_path: Path) -> None:
    save(RECORD, tmp_path / "r.json")
    with pytest.raises(Error, match=re.escape(message)):
        save(record, tmp_path / name)
    assert load(tmp_path / "r.json") == RECORD
