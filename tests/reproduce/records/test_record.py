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
from reproduce.records.record import Record, Result, Run, hardware_name, load, save, write_atomically

RUN = Run(
    state="finished",
    command=["python", "-m", "reproduce"],
    seed=1,
    started="2020-04-21T10:02:05Z",
    ended=None,
    device="cuda",
    devices=2,
    threads_per_device=None,
    machine=Machine("Linux", "a CPU", 4, 8, None, [Gpu("a GPU", 1 << 34, power_limit=250.0)]),
    versions={"torch": "2.11.0", "torchvision": None},
    git=Git("abc", dirty=True),
    load=[0.5, 0.25, 1.0],
    settings={"amoebanet-speed": {"warmup": 1}},
)
RESULTS = [
    Result(
        "e",
        "r",
        "measured",
        "small",
        "cpu",
        {"L": 18, "balance": [1, 2]},
        over="r",
        samples={"step_time": [0.1, 1e-9]},
    ),
    Result("e", "s", "failed", reason='RuntimeError: "quoted" ünïcode\n[1,\n 2]'),
]
RECORD = Record("name", "Title", "measured", {"step_time": "s"}, RESULTS, run=RUN)


@pytest.mark.parametrize(
    "record", [RECORD, replace(RECORD, run=None, results=[]), replace(RECORD, discrepancies=RESULTS)]
)
def test_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    save(record, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record


def test_is_written_for_people(tmp_path: Path) -> None:
    save(RECORD, tmp_path / "r.json")
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert lines[1:3] == [' "format": "torchgpipe-reproduce",', ' "version": 2,']
    assert '    "step_time": [0.1, 1e-09]' in lines, "a list of values stands on one line"
    assert not any("reason" in line for line in lines[: lines.index('   "row": "s",')]), "what is not there is left out"


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_kill_leaves_the_old_file(
    moment: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    save(RECORD, path)
    old = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise error

    if moment == "write":
        monkeypatch.setattr(Path, "open", fail)
    else:
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises((Error, KeyboardInterrupt)):
        save(replace(RECORD, title="new"), path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["r.json"], "nothing is left behind"


def test_is_written_in_one_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []
    monkeypatch.setattr(os, "replace", lambda part, path: replaced.append((Path(part).read_text(), path)))
    write_atomically(tmp_path / "t.md", "text")
    assert replaced == [("text", tmp_path / "t.md")]
    assert not (tmp_path / "t.md").exists()


ROW = {"experiment": "e", "row": "r", "status": "measured"}
GOOD = {
    "format": "torchgpipe-reproduce", "version": 2, "name": "n", "title": "t", "kind": "measured", "unit": {},
    "results": [ROW],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON: Input data was truncated"),
        (b'{\n "format": }', "not JSON: invalid character (byte 13)"),
        (b"[]", 'not a record (its "format" is not "torchgpipe-reproduce")'),
        (b"{}", 'not a record (its "format" is not "torchgpipe-reproduce")'),
        (b'{"format": "pytest-benchmark"}', 'not a record (its "format" is not "torchgpipe-reproduce")'),
        ({**GOOD, "version": 3}, "record version 3; this program reads versions 1 and 2"),
        ({**GOOD, "version": None}, "record version None; this program reads versions 1 and 2"),
        ({**GOOD, "version": True}, "record version True; this program reads versions 1 and 2"),
        ({**GOOD, "results": [ROW, ROW]}, "results[1]: 'r' of e is in results[0] already"),
        (
            {**GOOD, "results": [{**ROW, "status": "predicted"}]},
            "results[0].hardware: missing; a prediction names the hardware description it was made with",
        ),
        (
            {**GOOD, "results": [{**ROW, "status": "predicted"}], "hardware": {"name": 3}},
            "results[0].hardware: missing; a prediction names the hardware description it was made with",
        ),
        (
            {**GOOD, "results": [{**ROW, "samples": {"step_time": [1, 2], "round": [0]}}]},
            "results[0].samples.round: 1 rounds for 2 steps",
        ),
        ({**GOOD, "kind": "guessed"}, "kind: Invalid enum value 'guessed'"),
        ({**GOOD, "results": [{"experiment": "e", "row": "r"}]}, "results[0]: Object missing required field `status`"),
        (
            {**GOOD, "results": [{**ROW, "samples": {"step_time": ["1"]}}]},
            "results[0].samples[...][0]: Expected `int | float`, got `str`",
        ),
        ({**GOOD, "color": 1}, "Object contains unknown field `color`"),
        ({**GOOD, "scale": 1}, "scale: Expected `str | null`, got `int`"),
        (json.dumps({"x": float("nan")}).encode(), "not JSON: invalid character (byte 6)"),
        (
            json.dumps({**GOOD, "results": [{**ROW, "samples": {"x": [7]}}]}).replace("7", "1e999").encode(),
            "not JSON: Number out of range - at `$[...][0][...][...][0]`",
        ),
    ],
)
def test_refuses(content: bytes | dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(Error) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("named", [{"row": "p40x8"}, {"record": "p40x8"}])
def test_a_prediction_names_its_hardware(named: dict[str, str], tmp_path: Path) -> None:
    rows = [Result("e", "r", "predicted", hardware=named.get("row"))]
    hardware = {"name": named["record"], "devices": 8} if "record" in named else None
    record = Record("name", "Title", "predicted", {}, rows, hardware=hardware)
    save(record, tmp_path / "r.json")
    found = load(tmp_path / "r.json")
    assert found == record and hardware_name(found, found.results[0]) == "p40x8"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"r\.json: cannot be read \(No such file or directory\)"):
        load(tmp_path / "r.json")


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"r\.json: cannot be written \(No such file or directory\)"):
        save(RECORD, tmp_path / "none" / "r.json")


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([replace(RESULTS[0], samples={"step_time": [float("nan")]})], "Out of range float values are not JSON"),
        ([RESULTS[0], RESULTS[0]], "results[1]: 'r' of e is in results[0] already"),
        ([replace(RESULTS[0], status="predicted")], "results[0].hardware: missing"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(results: list[Result], message: str, tmp_path: Path) -> None:
    save(RECORD, tmp_path / "r.json")
    with pytest.raises(Error, match=re.escape(message)):
        save(replace(RECORD, results=results), tmp_path / "r.json")
    assert load(tmp_path / "r.json") == RECORD
