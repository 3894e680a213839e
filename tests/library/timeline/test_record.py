"""Recording: mini-batches are told apart, the bubble is that of the schedule, and what cannot be is refused."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.plan.replay import Costs, Event, replay
from torchgpipe.timeline import Recording, record
from torchgpipe.timeline.record import mini_batches


def test_the_bubble_of_tasks_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second. So the 8 tasks take one each, and there is one between any two."""
    model = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2,
                  checkpoint="never", engine="graph")  # fmt: skip
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    with record(model) as recording:
        for _ in range(2):
            model(torch.rand(2, 1)).sum().backward()
    assert [step.seconds for step in recording.steps] == [15, 15]
    assert recording.steps[1].bubble == pytest.approx(1 - 8 / 30)
    assert str(recording) == "2 mini-batches, 30 s: bubble 73.3% (partition 0 73.3%, partition 1 73.3%)"


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 4), (4, 8)])
def test_the_bubble_of_equal_tasks(n: int, m: int) -> None:
    """Time between mini-batches counts nowhere."""
    ones = [[1.0] * n] * m
    events = replay(Costs(ones, ones, [[0.0] * n] * m)).events
    later = [event._replace(start=event.start + 1000, end=event.end + 1000) for event in events]
    steps = mini_batches(reversed(events + later), n)
    assert [sorted(step.events) for step in steps] == [sorted(events), sorted(later)]
    share = f"{(n - 1) / (m + n - 1):.1%}"
    each = ", ".join(f"rank {j} {share}" for j in range(n))
    said = str(Recording(steps, 0.00025, over_ranks=True))
    assert said.endswith(f" s: bubble {share} ({each}); clocks agree to 0.25 ms")


def test_only_whole_mini_batches_count() -> None:
    events = [Event("forward", 1, 0, 1.0, 2.0), Event("forward", 0, 0, 5.0, 6.0), Event("forward", 1, 0, 7.0, 8.0)]
    (step,) = mini_batches(events, 1)
    assert step.events == [("forward", 0, 0, 0.0, 1.0), ("forward", 1, 0, 2.0, 3.0)] and step.seconds == 3
    assert str(Recording()) == "no mini-batch was recorded"


@pytest.mark.parametrize(
    ("file", "observer", "error"),
    [("t.json", print, ValueError), ("none/t.json", None, FileNotFoundError), ("t.json", None, None)],
)
def test_refuses_before_anything_is_trained(
    file: str, observer: Any, error: type[Exception] | None, tmp_path: Path
) -> None:
    model = GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"])
    model.observer = observer
    entered = False
    try:
        with record(model, tmp_path / file):
            entered = True
    except Exception as raised:
        assert type(raised) is error and not entered
    assert entered == (error is None) == (tmp_path / file).exists() and model.observer is observer
