"""Records: they come back as they were, are replaced whole or not at all, and foreign files are refused."""

from __future__ import annotations

import json
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


ROW = {"experiment": "e", "row": "r", "status": "measured"}
EMULATED = {**ROW, "status": "emulated", "emulated": True}
GOOD = {
    "format": "torchgpipe-reproduce", "version": 3, "name": "n", "title": "t", "kind": "measured", "unit": {},
    "results": [ROW],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "not JSON: Input data was truncated"),
        (b'{"x": NaN}', "not JSON: invalid character (byte 6)"),
        (b'{"x": [1e999]}', "not JSON: Number out of range - at `$[...][0]`"),
        (b"[]", 'not a record (its "format" is not "torchgpipe-reproduce")'),
        (b'{"format": "pytest-benchmark"}', 'not a record (its "format" is not "torchgpipe-reproduce")'),
        ({**GOOD, "version": 4}, "record version 4; this program reads versions 1 and 2 and 3"),
        ({**GOOD, "version": True}, "record version True; this program reads versions 1 and 2 and 3"),
        ({**GOOD, "results": [{**ROW, "emulated": True}]},
         "results[0].emulated: is True, and its status is 'measured'"),
        ({**GOOD, "results": [{**ROW, "status": "emulated"}]},
         "results[0].emulated: is False, and its status is 'emulated'"),
        ({**GOOD, "results": [EMULATED, ROW, EMULATED]}, "results[2]: 'r' of e is in results[0] already"),
        ({**GOOD, "results": [ROW, ROW]}, "results[1]: 'r' of e is in results[0] already"),
        ({**GOOD, "results": [{**ROW, "status": "predicted"}]},
         "results[0].hardware: missing; a prediction names the hardware description it was made with"),
        ({**GOOD, "results": [{**ROW, "samples": {"step_time": [1, 2], "round": [0]}}]},
         "results[0].samples.round: 1 rounds for 2 steps"),
        ({**GOOD, "kind": "guessed"}, "kind: Invalid enum value 'guessed'"),
        ({**GOOD, "results": [{"experiment": "e", "row": "r"}]}, "results[0]: Object missing required field `status`"),
        ({**GOOD, "results": [{**ROW, "samples": {"step_time": ["1"]}}]},
         "results[0].samples[...][0]: Expected `int | float`, got `str`"),
        ({**GOOD, "color": 1}, "Object contains unknown field `color`"),
        ({**GOOD, "scale": 1}, "scale: Expected `str | null`, got `int`"),
    ],
)  # fmt: skip
def test_refuses(content: bytes | dict[str, object] | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(Error) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


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
