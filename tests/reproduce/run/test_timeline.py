"""Timelines: every task of a step is in its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.timed import record_step
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe import GPipe
from torchgpipe.plan.replay import Timeline
from torchgpipe.timeline.stopwatch import Mark

ROW = replace(EXPERIMENTS["unet-speed"].scale("small").rows[0], size=(1, 2), input_shape=(3, 64, 64), batch_size=4)
PIPELINE = {"partitions": 2, "chunks": 4, "balance": (30, 35), "checkpoint": "except_last"}


def watched(**changes: object) -> tuple[Training, Timeline]:
    row = replace(ROW, **changes)  # type: ignore[arg-type]
    devices = Devices("cpu", 2, 1)
    training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
    return training, record_step(training, devices)


def test_every_task_of_a_pipeline_is_seen() -> None:
    training, timeline = watched(**PIPELINE)
    kinds = Counter((event.kind, event.partition) for event in timeline.events)
    assert kinds == {("forward", 0): 4, ("forward", 1): 4, ("recompute", 0): 3, ("recompute", 1): 3,
                     ("backward", 0): 4, ("backward", 1): 4}  # fmt: skip
    assert all(0 <= event.start < event.end <= timeline.seconds for event in timeline.events)
    for device in range(2):  # one at a time
        ordered = sorted((e for e in timeline.events if e.partition == device), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in pairwise(ordered))
    assert isinstance(training.model, GPipe) and training.model.observer is None, "nobody watches any more"


def test_plain_training_is_two_tasks() -> None:
    _, timeline = watched()
    assert [event[:3] for event in timeline.events] == [("forward", 0, 0), ("backward", 0, 0)]
    assert timeline.partitions == 1


def in_order(timeline: Timeline, together: bool) -> list[list[tuple[object, ...]]]:
    """Return each partition's tasks in the order in which they start; of all partitions where they take turns."""
    tasks = [event[:3] for event in sorted(timeline.tasks, key=lambda each: each.start)]
    return [[task for task in tasks if task[2] == j] for j in range(3)] if together else [[*tasks]]


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize(("balance", "chunks"), [((65,), 3), ((30, 35), 1), ((30, 35), 4), ((20, 20, 25), 3)], ids=str)
def test_an_emulation_replays_tasks_in_the_order_of_a_real_run(
    balance: tuple[int, ...], chunks: int, mode: str
) -> None:
    training, real = watched(partitions=len(balance), balance=balance, chunks=chunks, checkpoint=mode)
    devices = Devices("cpu", 2, 1)
    emulation = Emulation(training.row, devices, FakeData([training.row], 0), Balancer(devices), 0)
    emulation.run()
    assert in_order(emulation.step().timeline, chunks > 1) == in_order(real, chunks > 1)


class FakeEvent:
    """Stand in for a CUDA event, which notes a made-up time of the device when it is recorded."""

    now: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.time = FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1000 * (other.time - self.time)


def test_on_cuda_the_device_takes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be long past a task that the device has not begun."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    device = torch.device("cuda:1")
    start = Mark(device)
    monkeypatch.setattr(FakeEvent, "now", 2.5)
    end = Mark(device)
    assert end.since(start) == end.work_since(start) == 2.5
