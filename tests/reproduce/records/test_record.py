"""Tests of the files of results, called records.

Records of every version of the format can be loaded and saved, and are written atomically. An error
says which place in a record is wrong.
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial
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
NAN = replace(TIMED, samples={"x": [float("nan")]})
NO_STEP = replace(TIMED, samples={"step_time": [1.0, float("nan")]})
RECORD = Record("name", "Title", "measured", {"step_time": "s"}, [TIMED, FAILED], run=RUN)
COMMITTED = sorted(RESULTS.rglob("*.json"))


def test_comes_back_as_it_was_with_ten_digits(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    emulated = replace(TIMED, status="emulated", emulated=True)
    results = [TIMED, emulated, replace(FAILED, emulated=True)]
    record = replace(RECORD, results=results, discrepancies=[FAILED])
    save(record, path)
    assert load(path) == record

    long = replace(TIMED, samples={"loss": [2 / 3]})
    save(replace(RECORD, results=[long]), path)
    (short,) = load(path).results
    assert short.samples == {"loss": [0.6666666667]}


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

    path = tmp_path / "r.json"
    save(RECORD, path)
    with monkeypatch.context() as broken, pytest.raises((Error, KeyboardInterrupt)):
        broken.setattr(owner, step, fail)
        save(replace(RECORD, title="new"), path)
    assert load(path) == RECORD
    assert os.listdir(tmp_path) == ["r.json"], "nothing is left behind"


@pytest.mark.parametrize(
    ("record", "name", "message"),
    [
        (RECORD, "none/r.json", "none/r.json: cannot be written (No such file or directory)"),
        (replace(RECORD, results=[NAN]), "r.json", "Out of range float"),
        (
            replace(RECORD, results=[FAILED, NO_STEP]),
            "r.json",
            "r.json: cannot be written: results[1].samples.step_time[1]: the time of 'r' is nan",
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
    path = tmp_path / "r.json"
    save(RECORD, path)
    with pytest.raises(Error, match=re.escape(message)):
        save(record, tmp_path / name)
    assert load(path) == RECORD


@pytest.mark.parametrize("version", range(1, VERSION))
def test_an_old_version_is_read_and_written_as_the_newest(version: int, tmp_path: Path) -> None:
    data = json.loads((DATA / "record-v1.json").read_text())
    if version == 2:
        data = {**upgrade(data, 1), "version": 2}
        data["results"][0]["over_published"] = "n2m1"
    old, new = tmp_path / "old.json", tmp_path / "r.json"
    old.write_text(json.dumps(data))

    record = load(old)
    save(record, new)

    assert record.run is not None
    assert record.run.versions == {"torch": "2.11.0", "cuda": "12.8", "driver": "575.57.08"}
    gpu = Gpu("Tesla P40", 24032378880, clock=1531.0, power_limit=250.0)
    assert record.run.machine.gpus == [gpu, gpu]
    measured, lacking = record.results
    assert measured.status == "measured"
    assert measured.samples["step_time"] == [1.5, 1.25]
    assert lacking.status == "needs devices"
    written = json.loads(new.read_text())
    assert written["version"] == VERSION
    assert load(new) == record


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_loads_and_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    record = load(path)
    assert record.results
    save(record, copy)
    assert copy.read_bytes() == path.read_bytes()


def test_published_tables_are_what_an_import_writes(tmp_path: Path) -> None:
    tables = []
    names = sorted(path.stem for path in PAPER.glob("*.json"))
    for record in map(published, names):
        rows = []
        for result in record.results:
            row = {"experiment": result.row, "config": result.config, "values": result.values}
            rows.append(row)
        table: dict[str, Any] = {"id": record.name, "rows": rows}
        for field in ("title", "source", "hardware", "software", "unit", "columns", "notes"):
            table[field] = getattr(record, field)
        tables.append(table)
    source = tmp_path / "source"
    source.write_text(json.dumps(tables))

    written = import_tables(source, tmp_path)

    assert [path.stem for path in written] == names
    for path in written:
        committed = PAPER / path.name
        assert path.read_bytes() == committed.read_bytes()


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
    """Return the JSON contents of a file in the folder `data`, with one value replaced.

    Args:
        file: The name of the file.
        place: The keys and indices that lead to the value.
        to: The new value.
    """
    text = (DATA / file).read_text()
    data = json.loads(text)
    inner: Any = data
    *outer, last = place
    for key in outer:
        inner = inner[key]
    inner[last] = to
    return data


def fields(**changes: Any) -> dict[str, Any]:
    return {**FIELDS, **changes}


def of_row(**changes: Any) -> dict[str, Any]:
    return fields(results=[{**ROW, **changes}])


def trace(*events: Any) -> dict[str, Any]:
    return {"traceEvents": list(events)}


OLD = partial(changed, "record-v1.json")
BENCHMARK = partial(changed, "pytest-benchmark.json")
NO_TIME = "the time of 'r' is"
NO_TRACE = "not a trace of a step"
# For each function that reads a file: broken contents, and the error message.
BROKEN: dict[Callable[[Path], object], list[tuple[Any, str]]] = {
    load: [
        (None, "cannot be read (No such file or directory)"),
        (b'{"x": NaN,}', "not JSON: invalid character (byte 6)"),
        (b'{"x": [1, -Infinity]}', "x[1]: the value is -inf, but JSON allows only finite numbers"),
        (
            of_row(samples={"loss": [1.0, float("nan")]}),
            "results[0].samples.loss[1]: the value of 'r' is nan, but JSON allows only",
        ),
        (of_row(samples={"step_time": [1, 0]}), f"results[0].samples.step_time[1]: {NO_TIME} 0, "),
        (of_row(samples={"time": [-0.5]}), f"results[0].samples.time[0]: {NO_TIME} -0.5, but a "),
        (of_row(values={"step_time": 0}), f"results[0].values.step_time: {NO_TIME} 0, but a time"),
        (b"[]", 'this file is not a record (its "format" is not "torchgpipe-reproduce")'),
        (fields(version=4), "record version 4; this program reads versions 1 and 2 and 3"),
        (fields(version=True), "record version True; this program reads versions 1 and 2 and 3"),
        (of_row(emulated=True), "results[0].emulated: is True, and its"),
        (of_row(status="emulated"), "results[0].emulated: is False, and"),
        (
            fields(results=[EMULATED, ROW, EMULATED]),
            "results[2]: 'r' of e is in results[0] already",
        ),
        (of_row(status="predicted"), "results[0].hardware: missing; a"),
        (
            of_row(samples={"step_time": [1, 2], "round": [0]}),
            "results[0].samples.round: 1 rounds for 2 steps",
        ),
        (
            of_row(samples={"step_time": [1, 2], "round": [3, 3]}),
            "results[0].samples.round: two steps of 'r' have the same round",
        ),
        (of_row(values={"bubble": 1.7}), "results[0].values.bubble: the bubble of 'r' is 1.7, but"),
        (
            of_row(config={"batch_size": 0}),
            "results[0].config.batch_size: the batch size of 'r' is 0",
        ),
        (
            of_row(config={"batch_size": "16"}),
            "results[0].config.batch_size: the batch size of 'r' is '16', but it must be a whole",
        ),
        (
            of_row(values={"utilization": [0.5, 7.0]}),
            "results[0].values.utilization: a device of 'r' has the utilization 7",
        ),
        (fields(unit={"step_time": "ms"}), "unit.step_time: is 'ms', but times in a record are in"),
        (OLD("run", "devices", to=-2), "run.devices: is -2, but must be at least 1"),
        (OLD("run", "started", to="yesterday"), "run.started and run.ended: are 'yesterday' and"),
        (
            OLD("run", "ended", to="2001-01-01T00:00:00Z"),
            "run.ended: 2001-01-01T00:00:00Z",
        ),
        (fields(kind="guessed"), "kind: Invalid enum value 'guessed'"),
        (fields(color=1), "Object contains unknown field `color`"),
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
        (
            BENCHMARK("benchmarks", 0, "stats", "data", 2, to=0.0),
            "benchmarks[0].stats.data[2]: the time of 'test_one[1]' is 0, but a time must be",
        ),
        (
            BENCHMARK("benchmarks", 1, "stats", "median", to=-1.0),
            "benchmarks[1].stats.median: the time of 'test_two' is -1, but a time must be",
        ),
    ],
    read_trace: [
        ({}, f"{NO_TRACE}: Object missing required field `traceEvents`"),
        (trace(), f'{NO_TRACE} (it has no task, an event with "ph": "X")'),
        (trace({**TASK, "cat": "copy"}), f"{NO_TRACE} (it has no task"),
        (trace(TASK, 3), f"{NO_TRACE}: traceEvents[1]: "),
        (trace({**TASK, "cat": "sleep"}), f"{NO_TRACE}: traceEvents[0].cat: "),
    ],
}


FILES: list[tuple[Callable[[Path], object], Any, str]] = []
for reader, rows in BROKEN.items():
    FILES += [(reader, content, message) for content, message in rows]


@pytest.mark.parametrize(("read", "content", "message"), FILES)
def test_a_broken_file_is_refused(
    read: Callable[[Path], object], content: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(json.dumps(content))
    with pytest.raises(Error) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")
