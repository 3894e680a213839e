"""Whatever is wrong in a file, of a record or another, is told in one line that says where."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.numbers.sources import load_side
from reproduce.records.published import import_tables
from reproduce.records.record import load
from reproduce.report.trace import read_trace

DATA = Path(__file__).with_name("data")
ROW = {"experiment": "e", "row": "r", "status": "measured"}
EMULATED = {**ROW, "status": "emulated", "emulated": True}
RECORD = {
    "format": "torchgpipe-reproduce", "version": 3, "name": "n", "title": "t", "kind": "measured", "unit": {},
    "results": [ROW],
}  # fmt: skip
TABLE: dict[str, Any] = {
    "id": "t", "title": "T", "source": {}, "hardware": None, "software": None, "unit": {}, "columns": ["x"],
    "rows": [{"experiment": "a", "config": {}, "values": {"x": 1}}], "notes": [],
}  # fmt: skip
TASK = {"ph": "X", "cat": "forward", "name": "", "pid": 0, "tid": 0, "ts": 0, "dur": 1,
        "args": {"micro-batch": 0, "partition": 0}}  # fmt: skip


def changed(file: str, *place: Any, to: object) -> Any:
    """Return what is in a file of `data`, with something else at a place."""
    data: Any = json.loads((DATA / file).read_text())
    *outer, last = place
    functools.reduce(operator.getitem, outer, data)[last] = to
    return data


OLD, BENCHMARK = functools.partial(changed, "record-v1.json"), functools.partial(changed, "pytest-benchmark.json")
NO_TRACE = "not a trace of a step"
BROKEN: dict[Callable[[Path], object], list[tuple[Any, str]]] = {
    load: [
        (None, "cannot be read (No such file or directory)"),
        (b'{"x": NaN}', "not JSON: invalid character (byte 6)"),
        (b"[]", 'not a record (its "format" is not "torchgpipe-reproduce")'),
        ({**RECORD, "version": 4}, "record version 4; this program reads versions 1 and 2 and 3"),
        ({**RECORD, "version": True}, "record version True; this program reads versions 1 and 2 and 3"),
        ({**RECORD, "results": [{**ROW, "emulated": True}]}, "results[0].emulated: is True, and its"),
        ({**RECORD, "results": [{**ROW, "status": "emulated"}]}, "results[0].emulated: is False, and"),
        ({**RECORD, "results": [EMULATED, ROW, EMULATED]}, "results[2]: 'r' of e is in results[0] already"),
        ({**RECORD, "results": [{**ROW, "status": "predicted"}]}, "results[0].hardware: missing; a"),
        ({**RECORD, "results": [{**ROW, "samples": {"step_time": [1, 2], "round": [0]}}]},
         "results[0].samples.round: 1 rounds for 2 steps"),
        ({**RECORD, "kind": "guessed"}, "kind: Invalid enum value 'guessed'"),
        ({**RECORD, "color": 1}, "Object contains unknown field `color`"),
        (OLD("results", to=3), "results: Expected `array`, got `int`"),
        (OLD("results", 1, to=3), "results[1]: Expected `object`, got `int`"),
        (OLD("run", "machine", "gpus", to={}), "run.machine.gpus: Expected `array`, got `object`"),
        (OLD("run", "machine", "gpus", 1, to="x"), "run.machine.gpus[1]: Expected `object`, got `str`"),
    ],
    lambda path: import_tables(path, path.parent): [
        ([TABLE, {**TABLE, "id": 3}], "[1].id: Expected `str`, got `int`"),
        ([{**TABLE, "rows": [{"experiment": "a"}]}], "[0].rows[0]: Object missing required field `config`"),
    ],
    lambda path: load_side("A", str(path)): [
        (BENCHMARK("benchmarks", to=3), "benchmarks: Expected `array`, got `int`"),
        (BENCHMARK("machine_info", to=[]), "machine_info: Expected `object`, got `array`"),
    ],
    read_trace: [
        ({}, f"{NO_TRACE}: Object missing required field `traceEvents`"),
        ({"traceEvents": []}, f'{NO_TRACE} (no event is a task, "ph": "X")'),
        ({"traceEvents": [{**TASK, "cat": "copy"}]}, f"{NO_TRACE} (no event is a task"),
        ({"traceEvents": [TASK, 3]}, f"{NO_TRACE}: traceEvents[1]: "),
        ({"traceEvents": [{"ph": "X", "cat": "forward"}]}, f"{NO_TRACE}: traceEvents[0]: "),
        ({"traceEvents": [{**TASK, "cat": "sleep"}]}, f"{NO_TRACE}: traceEvents[0].cat: "),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("read", "content", "message"), [(read, *row) for read in BROKEN for row in BROKEN[read]])
def test_a_broken_file_is_refused(read: Callable[[Path], object], content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(Error) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {message}")
