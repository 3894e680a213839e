"""Records can be saved and loaded in every version; writes are atomic; errors say where a record is broken."""

import functools
import json
import operator
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.description import Gpu
from reproduce.numbers.sources import load_side
from reproduce.records.places import RESULTS
from reproduce.records.published import PAPER, import_tables, published
from reproduce.records.record import VERSION, Record, Result, load, save
from reproduce.records.upgrade import upgrade
from reproduce.report.trace import read_trace

from ..made import RUN

DATA = Path(__file__).with_name("data")
TIMED = Result(
    "e",
    "r",
    "measured",
    "small",
    "cpu",
    {"balance": [1, 2]},
    over="r",
    samples={"step_time": [0.1, 1e-9]},
)
FAILED = Result("e", "s", "failed", reason='RuntimeError: "quoted" ünïcode\n[1,\n 2]')
RECORD = Record("name", "Title", "measured", {"step_time": "s"}, [TIMED, FAILED], run=RUN)
COMMITTED = sorted(RESULTS.rglob("*.json"))


def test_comes_back_as_it_was_with_ten_digits(tmp_path: Path) -> None:
    emulated = [replace(TIMED, status="emulated", emulated=True), replace(FAILED, emulated=True)]
    record = replace(RECORD, results=[TIMED, *emulated], discrepancies=[FAILED])
    save(record, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record
    save(replace(RECORD, results=[replace(TIMED, samples={"loss": [2 / 3]})]), tmp_path / "r.json")
    assert load(tmp_path / "r.json").results[0].samples == {"loss": [0.6666666667]}


@pytest.mark.parametrize(
    ("owner", "step", "error"),
    [
        (Path, "open", OSError()),
        (os, "fsync", OSError("disk full")),
        (os, "replace", KeyboardInterrupt()),
    ],
)
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
        (
            replace(RECORD, results=[replace(TIMED, samples={"x": [float("nan")]})]),
            "r.json",
            "Out of range float",
        ),
        (
            replace(RECORD, results=[TIMED, TIMED]),
            "r.json",
            "results[1]: 'r' of e is in results[0] already",
        ),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    record: Record, name: str, message: str, tmp_path: Path
) -> None:
    save(RECORD, tmp_path / "r.json")
    with pytest.raises(Error, match=re.escape(message)):
        save(record, tmp_path / name)
    assert load(tmp_path / "r.json") == RECORD


@pytest.mark.parametrize("version", range(1, VERSION))
def test_an_old_version_is_read_and_written_as_the_newest(version: int, tmp_path: Path) -> None:
    data = json.loads((DATA / "record-v1.json").read_text())
    if version == 2:
        data = {**upgrade(data, 1), "version": 2}
        data["results"][0]["over_published"] = "n2m1"
    (tmp_path / "old.json").write_text(json.dumps(data))
    record = load(tmp_path / "old.json")
    assert record.run is not None
    assert record.run.versions == {"torch": "2.11.0", "cuda": "12.8", "driver": "575.57.08"}
    assert (
        record.run.machine.gpus
        == [Gpu("Tesla P40", 24032378880, clock=1531.0, power_limit=250.0)] * 2
    )
    assert [result.status for result in record.results] == ["measured", "needs devices"]
    assert record.results[0].samples["step_time"] == [1.5, 1.25]
    save(record, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["version"] == VERSION
    assert load(tmp_path / "r.json") == record


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_loads_and_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    record = load(path)
    assert record.results
    save(record, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_published_tables_are_what_an_import_writes(tmp_path: Path) -> None:
    tables = []
    for record in map(published, sorted(path.stem for path in PAPER.glob("*.json"))):
        rows = [
            {"experiment": each.row, "config": each.config, "values": each.values}
            for each in record.results
        ]
        fields = ("title", "source", "hardware", "software", "unit", "columns", "notes")
        tables.append(
            {"id": record.name, "rows": rows, **{field: getattr(record, field) for field in fields}}
        )
    (tmp_path / "source").write_text(json.dumps(tables))
    written = import_tables(tmp_path / "source", tmp_path)
    assert [path.stem for path in written] == [table["id"] for table in tables]
    assert all(path.read_bytes() == (PAPER / path.name).read_bytes() for path in written)


ROW = {"experiment": "e", "row": "r", "status": "measured"}
EMULATED = {**ROW, "status": "emulated", "emulated": True}
FIELDS = {
    "format": "torchgpipe-reproduce",
    "version": 3,
    "name": "n",
    "title": "t",
    "kind": "measured",
    "unit": {},
    "results": [ROW],
}
TASK = {
    "ph": "X",
    "cat": "forward",
    "name": "",
    "pid": 0,
    "tid": 0,
    "ts": 0,
    "dur": 1,
    "args": {"micro-batch": 0, "partition": 0},
}


def changed(file: str, *place: Any, to: object) -> Any:
    """Return the contents of a file in `data`, with one place changed."""
    data: Any = json.loads((DATA / file).read_text())
    *outer, last = place
    functools.reduce(operator.getitem, outer, data)[last] = to
    return data


OLD, BENCHMARK = (
    functools.partial(changed, "record-v1.json"),
    functools.partial(changed, "pytest-benchmark.json"),
)
NO_TRACE = "not a trace of a step"
BROKEN: dict[Callable[[Path], object], list[tuple[Any, str]]] = {
    load: [
        (None, "cannot be read (No such file or directory)"),
        (b'{"x": NaN}', "not JSON: invalid character (byte 6)"),
        (b"[]", 'not a record (its "format" is not "torchgpipe-reproduce")'),
        ({**FIELDS, "version": 4}, "record version 4; this program reads versions 1 and 2 and 3"),
        (
            {**FIELDS, "version": True},
            "record version True; this program reads versions 1 and 2 and 3",
        ),
        (
            {**FIELDS, "results": [{**ROW, "emulated": True}]},
            "results[0].emulated: is True, and its",
        ),
        (
            {**FIELDS, "results": [{**ROW, "status": "emulated"}]},
            "results[0].emulated: is False, and",
        ),
        (
            {**FIELDS, "results": [EMULATED, ROW, EMULATED]},
            "results[2]: 'r' of e is in results[0] already",
        ),
        (
            {**FIELDS, "results": [{**ROW, "status": "predicted"}]},
            "results[0].hardware: missing; a",
        ),
        (
            {**FIELDS, "results": [{**ROW, "samples": {"step_time": [1, 2], "round": [0]}}]},
            "results[0].samples.round: 1 rounds for 2 steps",
        ),
        ({**FIELDS, "kind": "guessed"}, "kind: Invalid enum value 'guessed'"),
        ({**FIELDS, "color": 1}, "Object contains unknown field `color`"),
        (OLD("results", to=3), "results: Expected `array`, got `int`"),
        (
            OLD("run", "machine", "gpus", 1, to="x"),
            "run.machine.gpus[1]: Expected `object`, got `str`",
        ),
    ],
    lambda path: import_tables(path, path.parent): [
        ([{"id": 3}], "[0].id: Expected `str`, got `int`"),
        ([{"rows": [{"experiment": "a"}]}], "[0].rows[0]: Object missing required field `config`"),
    ],
    lambda path: load_side("A", str(path)): [
        (BENCHMARK("benchmarks", to=3), "benchmarks: Expected `array`, got `int`"),
    ],
    read_trace: [
        ({}, f"{NO_TRACE}: Object missing required field `traceEvents`"),
        ({"traceEvents": []}, f'{NO_TRACE} (no event is a task, "ph": "X")'),
        ({"traceEvents": [{**TASK, "cat": "copy"}]}, f"{NO_TRACE} (no event is a task"),
        ({"traceEvents": [TASK, 3]}, f"{NO_TRACE}: traceEvents[1]: "),
        ({"traceEvents": [{**TASK, "cat": "sleep"}]}, f"{NO_TRACE}: traceEvents[0].cat: "),
    ],
}


@pytest.mark.parametrize(
    ("read", "content", "message"), [(read, *row) for read in BROKEN for row in BROKEN[read]]
)
def test_a_broken_file_is_refused(
    read: Callable[[Path], object], content: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(Error) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")
