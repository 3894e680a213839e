"""Trace: a measured step's timeline is read back, and a file that is none is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.report.timelines import trace_figures
from reproduce.report.trace import read_trace
from torchgpipe.plan.replay import Event


def task(kind: str, start: float, duration: float, micro_batch: int = 0, partition: int = 0) -> dict[str, Any]:
    place = {"micro-batch": micro_batch, "partition": partition}
    return {"ph": "X", "name": kind, "cat": kind, "pid": 0, "tid": 0, "ts": start, "dur": duration, "args": place}


NAME = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "unet-speed: pipeline-2"}}
EVENTS = [
    NAME,
    task("backward", 5e6, 2e6, 1, 1),
    task("forward", 1e6, 1e6),
    task("copy", 2e6, 1e6),
    task("recompute", 4e6, 1e6, 1, 1),
]


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_timeline(tmp_path: Path) -> None:
    title, timeline = read_trace(write(tmp_path / "t.json", {"traceEvents": EVENTS}))
    assert title == "unet-speed: pipeline-2"
    assert (timeline.seconds, timeline.partitions) == (6.0, 2)
    assert timeline.events == [
        Event("forward", 0, 0, 0.0, 1.0),
        Event("recompute", 1, 1, 3.0, 4.0),
        Event("backward", 1, 1, 4.0, 6.0),
    ]
    ((svg, caption),) = trace_figures([(title, timeline)])
    assert caption == "Measured: unet-speed: pipeline-2; the devices wait 67% of 6 s."
    assert "unet-speed: pipeline-2" in svg and "recomputation" in svg


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], 'not a trace (it has no list of "traceEvents")'),
        ({"traceEvents": []}, 'not a trace of a step (no event is a task, "ph": "X")'),
        ({"traceEvents": [NAME, 3]}, "traceEvents[1]: Expected `object`, got `int`"),
        ({"traceEvents": [{"ph": "X", "cat": "forward"}]}, "traceEvents[0]: Object missing required field `ts`"),
        (
            {"traceEvents": [{**task("forward", 0.0, 1.0), "ts": "now"}]},
            "traceEvents[0]: ts: Expected `float`, got `str`",
        ),
        (
            {"traceEvents": [task("sleep", 0.0, 1.0)]},
            "traceEvents[0]: cat: Invalid enum value 'sleep'",
        ),
    ],
)
def test_refuses(content: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", content)
    with pytest.raises(Error) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: {message}"
