"""Traces: valid JSON for Perfetto, pictures that open, files named after what they show."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from reproduce.report.chrome_trace import chrome_trace
from reproduce.report.tracer import Tracer, matplotlib_problem
from reproduce.run.timeline import Span, StepTimeline
from torchgpipe.observe import Task

TIMELINE = StepTimeline(
    [
        Span(Task("forward", 0, 0), 0.0, 0.25),
        Span(Task("copy", 0, 0), 0.25, 0.3),
        Span(Task("forward", 0, 1), 0.3, 0.5),
        Span(Task("recompute", 0, 1), 0.5, 0.6),
        Span(Task("backward", 0, 1), 0.6, 1.0),
    ],
    seconds=1.25,
    devices=2,
)


def test_chrome_trace() -> None:
    trace = json.loads(chrome_trace(TIMELINE, "title"))
    events = trace["traceEvents"]
    names = {(event["name"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {
        ("process_name", 0): "title",
        ("thread_name", 0): "device 0",
        ("thread_name", 1): "device 0, copies",
        ("thread_name", 2): "device 1",
    }
    tasks = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert tasks[:3] == [
        ("forward 0", 0, 0, 250_000),
        ("copy 0", 1, 250_000, pytest.approx(50_000)),
        ("forward 0", 2, 300_000, pytest.approx(200_000)),
    ]
    assert trace["otherData"] == {"step_seconds": 1.25, "bubble": TIMELINE.bubble}


@pytest.mark.parametrize(
    ("file", "several", "written"),
    [
        ("t.json", False, ["t.json", "t.svg"]),
        ("t.svg", False, ["t.json", "t.svg"]),
        ("t.png", False, ["t.json", "t.png"]),
        ("t", False, ["t.json", "t.svg"]),
        ("v1.2", False, ["v1.2.json", "v1.2.svg"]),
        ("t.json", True, ["t-GPipe-n2m4-mb.json", "t-GPipe-n2m4-mb.svg"]),
    ],
)
def test_files(file: str, several: bool, written: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tracer = Tracer(tmp_path / file, several=several)
    tracer("unet-speed", "GPipe n2m4/mb", TIMELINE)
    assert [path.name for path in tracer.written] == sorted(path.name for path in tmp_path.iterdir()) == written


def test_pictures_say_the_bubble(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from reproduce.report.gantt import gantt

    picture = gantt(TIMELINE, "a title", "svg").decode()
    ET.fromstring(picture)
    # Text is drawn as paths; matplotlib writes what it says into comments.
    bubble = f"bubble {TIMELINE.bubble:.0%} of 2 x 1000 ms; the whole step took 1250 ms"
    for said in ("a title", bubble, "recomputation", "copy", "device 1"):
        assert f"<!-- {said}" in picture
    assert gantt(StepTimeline([], 1.0, 1), "nothing", "png").startswith(b"\x89PNG")


def test_without_matplotlib_there_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install matplotlib" in str(matplotlib_problem())
    Tracer(tmp_path / "t.json", several=False, draw=False)("e", "r", TIMELINE)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_what_cannot_be_written_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    tracer = Tracer(tmp_path / "t", several=False)
    tracer("e", "r", TIMELINE)
    assert len(tracer.problems) == 1 and "t.json: cannot be written (Is a directory)" in tracer.problems[0]
    assert [path.name for path in tracer.written] == ["t.svg"]


def test_rows_of_several_experiments_keep_apart(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "t.json", several=True, experiments=True, draw=False)
    for experiment in ("unet-speed", "unet-ablation"):
        tracer(experiment, "baseline", TIMELINE)
    assert [path.name for path in tracer.written] == ["t-unet-speed-baseline.json", "t-unet-ablation-baseline.json"]


def test_a_picture_that_cannot_be_drawn_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def gantt(*_: object) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr("reproduce.report.gantt.gantt", gantt)
    tracer = Tracer(tmp_path / "t", several=False)
    tracer("e", "r", TIMELINE)
    assert len(tracer.problems) == 1 and "t.svg: cannot be drawn (RuntimeError: no font)" in tracer.problems[0]
    assert [path.name for path in tracer.written] == ["t.json"]
