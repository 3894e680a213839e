"""Tests that traces of steps are drawn as timelines, and can be read back from their files."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from reproduce.report.gantt import gantt, trace_figures
from reproduce.report.trace import Tracer, read_trace
from torchgpipe.plan.predict.replay import Timeline
from torchgpipe.timeline.perfetto import perfetto

from ...library.timeline.test_record import STEP

TITLE = "unet-speed: pipeline-2"


@pytest.mark.parametrize(
    ("steps", "titles"), [(1, [TITLE]), (2, [f"{TITLE}, mini-batch {k}" for k in range(2)])]
)
def test_what_perfetto_shows_is_read_back(steps: int, titles: list[str], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(perfetto([STEP] * steps, TITLE, "device"))
    placed = dataclasses.replace(STEP, placement=[0, 1])
    assert read_trace(path) == [(title, placed) for title in titles]


def test_pictures_say_the_bubble() -> None:
    picture = gantt(STEP, "a title", "svg").decode()
    # matplotlib draws text as paths, and writes the text itself into comments.
    said = "bubble 55% of 2 x 1.25 s; the whole step took 1.75 s"
    for text in ("a title", said, "recomputation", "copy", "device 1"):
        assert text in picture
    assert gantt(Timeline([], 1.0, 1), "nothing", "png").startswith(b"\x89PNG")
    ((svg, caption),) = trace_figures([(TITLE, STEP)])
    assert caption == f"{TITLE}; the devices wait 55% of 1.25 s."
    assert TITLE in svg and "recomputation" in svg


@pytest.mark.parametrize(
    ("file", "options", "written"),
    [
        ("t.svg", {}, ["t.json", "t.svg"]),
        ("v1.2", {}, ["v1.2.json", "v1.2.svg"]),
        ("t.json", {"several": True}, ["t-GPipe-n2m4-mb.json", "t-GPipe-n2m4-mb.svg"]),
        (
            "t",
            {"several": True, "experiments": True, "draw": False},
            ["t-unet-speed-GPipe-n2m4-mb.json"],
        ),
    ],
)
def test_files(file: str, options: dict[str, Any], written: list[str], tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / file, **{"several": False, **options})
    tracer("unet-speed", "GPipe n2m4/mb", STEP)
    paths = [tmp_path / name for name in written]
    assert list(tracer.written) == paths
    assert sorted(tmp_path.iterdir()) == paths


def test_what_cannot_be_written_or_drawn_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.json").mkdir()
    tracer = Tracer(tmp_path / "t", several=False)
    tracer("e", "r", STEP)
    monkeypatch.setattr("reproduce.report.gantt.gantt", lambda *_: 1 / 0)
    tracer("e", "r", STEP)
    assert [path.name for path in tracer.written] == ["t.svg"]
    first, _, last = tracer.problems
    assert "t.json: cannot be written (" in first
    assert "t.svg: cannot be drawn (ZeroDivisionError" in last
