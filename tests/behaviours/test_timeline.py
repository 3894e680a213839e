"""A recorded timeline has all tasks of all partitions on one clock, in an order that can be, and says the bubble."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.timeline import record

from ..parts import Fails
from ..plain import piped
from .test_observer import expected_tasks

CHUNKS = 3


def pipeline(n: int, **way: Any) -> tuple[Any, Any]:
    """Return what to call, and what to record."""
    model = piped(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Fails()) for _ in range(n))), [1] * n, CHUNKS, **way)
    return model, model._pipeline if way["engine"] == "ranks" else model


def step(model: nn.Module) -> None:
    model(torch.rand(6, 4)).sum().backward()


@pytest.mark.parametrize("ahead", [0, 1000])
@pytest.mark.parametrize("n", [2, 3])
def test_all_partitions_on_one_clock(
    n: int, ahead: int, way: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recorded = pipeline(n, **way)
    first, clock = getattr(model, "rank", 0), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead * first)
    step(model)
    with record(recorded, tmp_path / "t.json") as recording:
        for _ in range(2):
            step(model)
    assert recorded.observer is None and len(recording.steps) == 2
    assert (recording.clock_error > 0) == (way["engine"] == "ranks") and recording.clock_error < 100
    slack = 2 * recording.clock_error
    for timeline in recording.steps:
        tasks = {event[:3]: event for event in timeline.events}
        assert set(tasks) == expected_tasks(CHUNKS, range(n), way["checkpoint"]) and len(timeline.events) == len(tasks)
        for i in range(CHUNKS):
            for j in range(n - 1):
                assert tasks["forward", i, j].end <= tasks["forward", i, j + 1].start + slack
                assert tasks["backward", i, j + 1].end <= tasks["backward", i, j].start + slack
        assert 0 <= timeline.bubble < 1 and 0 < timeline.seconds < 100
    row = "rank" if way["engine"] == "ranks" else "partition"
    assert f"({row} 0 " in str(recording) and f", {row} {n - 1} " in str(recording)
    assert ("clocks agree to" in str(recording)) == (row == "rank")

    assert [path.name for path in tmp_path.iterdir()] == ([] if first else ["t.json"])
    if not first:
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        kinds = Counter(event["cat"] for event in events if event["ph"] == "X" and event["cat"] != "bubble")
        assert kinds == Counter(event.kind for timeline in recording.steps for event in timeline.events)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_failure_leaves_no_file(when: str, way: dict[str, Any], tmp_path: Path) -> None:
    model, recorded = pipeline(2, **way)
    step(model)
    with pytest.raises(ZeroDivisionError), record(recorded, tmp_path / "t.json"):
        model[1][1].fail(when, ZeroDivisionError())
        step(model)
    assert recorded.observer is None and not [*tmp_path.iterdir()]
