"""Timelines: every task is in its place, and busy shares and the bubble follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.timeline import Span, StepTimeline, watch_step
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe.observe import Task

ROW = replace(EXPERIMENTS["unet-speed"].scale("small").rows[0], size=(1, 2), input_shape=(3, 64, 64), batch_size=4)
PIPELINE = {"partitions": 2, "chunks": 4, "balance": (30, 35), "checkpoint": "except_last"}


def spans(*places: tuple[str, int, float, float]) -> list[Span]:
    return [Span(Task(kind, i, device), start, end) for i, (kind, device, start, end) in enumerate(places)]  # type: ignore[arg-type]


# spans (kind, device, start, end), devices, seconds of the step, busy shares of the step, bubble
CASES = [
    ([("forward", 0, 1.0, 3.0)], 1, 4.0, [0.5], 0.0),
    ([("forward", 0, 0.0, 1.0), ("forward", 1, 1.0, 2.0)], 2, 2.0, [0.5, 0.5], 0.5),
    ([("forward", 0, 0.0, 2.0), ("backward", 1, 1.0, 2.0)], 2, 4.0, [0.5, 0.25], 0.25),
    ([("forward", 0, 0.0, 2.0), ("copy", 0, 0.0, 9.0)], 1, 4.0, [0.5], 0.0),
    ([("forward", 0, 0.0, 1.0), ("recompute", 0, 3.0, 4.0)], 1, 4.0, [0.5], 0.5),
    ([], 2, 1.0, [0.0, 0.0], 0.0),
]


@pytest.mark.parametrize(("places", "devices", "seconds", "busy", "bubble"), CASES)
def test_shares(
    places: list[tuple[str, int, float, float]], devices: int, seconds: float, busy: list[float], bubble: float
) -> None:
    timeline = StepTimeline(spans(*places), seconds, devices)
    assert timeline.busy() == pytest.approx(busy)
    assert timeline.bubble == pytest.approx(bubble)


def watched(**changes: object) -> tuple[Training, StepTimeline]:
    row = replace(ROW, **changes)  # type: ignore[arg-type]
    devices = Devices("cpu", 2, 1)
    training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
    return training, watch_step(training, devices)


def test_every_task_of_a_pipeline_is_seen() -> None:
    training, timeline = watched(**PIPELINE)
    kinds = Counter((span.task.kind, span.task.partition) for span in timeline.spans)
    assert kinds == {("forward", 0): 4, ("forward", 1): 4, ("recompute", 0): 3, ("recompute", 1): 3,
                     ("backward", 0): 4, ("backward", 1): 4}  # fmt: skip
    assert all(0 <= span.start <= span.end <= timeline.seconds for span in timeline.spans)
    for device in range(2):  # one at a time
        ordered = sorted((span for span in timeline.spans if span.task.partition == device), key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in pairwise(ordered))
    before = len(timeline.spans)
    training.step()
    assert len(timeline.spans) == before, "nobody watches any more"


def test_plain_training_is_two_tasks() -> None:
    _, timeline = watched()
    assert [span.task for span in timeline.spans] == [Task("forward", 0, 0), Task("backward", 0, 0)]
    assert timeline.devices == 1


def test_watching_changes_no_gradient() -> None:
    losses = []
    for _ in range(2):
        training, _ = watched(**PIPELINE)
        losses.append([p.sum() for p in training.model.parameters()])
    assert all(map(torch.equal, *losses))
