"""The observer sees every task once: with its right name, in the thread that runs it, in a possible order.

A recorded timeline has all tasks on one clock.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.engine.arrangement import arranged, orders
from torchgpipe.schedules import Action, Schedule, make
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Task
from torchgpipe.timeline import record

from ..parts import Fails
from ..plain import piped
from .parts.layers import linear, only_a_skip
from .row import step


class Log:
    """Record when tasks start and end, and which layers run in them."""

    def __init__(self) -> None:
        self.started: list[Task] = []
        self.ended: list[Task] = []
        self.running = threading.local()
        self.seen: set[tuple[int, Task, bool, bool]] = set()

    @contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        self.started.append(task)
        self.running.task = task
        try:
            yield
        finally:
            self.running.task = None
            self.ended.append(task)


class Witness(nn.Module):
    """Record in which task each pass of this layer runs."""

    def __init__(self, log: Log, k: int) -> None:
        super().__init__()
        self.log, self.k, self.linear = log, k, linear()

    def forward(self, x: Tensor) -> Tensor:
        self.note(is_checkpointing(), is_recomputing())
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.note(False, False))
        return y

    def note(self, *flags: bool) -> None:
        self.log.seen.add((self.k, self.log.running.task, *flags))


def observed(
    balance: list[int], chunks: int, way: dict[str, Any]
) -> tuple[Any, Log, Sequence[int]]:
    """Return a pipeline, the log of its observer, and the partitions whose tasks it sees: on ranks, its own."""
    log = Log()
    layers = (
        nn.Sequential(*(Witness(log, k) for k in range(6))) if sum(balance) == 6 else only_a_skip()
    )
    model = piped(layers, balance, chunks, **way)
    model.observer = log
    return model, log, [model.rank] if way.get("engine") == "ranks" else range(len(balance))


def tasks(kind: Any, m: int, partitions: Sequence[int]) -> set[Task]:
    return {Task(kind, i, j) for i in range(m) for j in partitions}


def expected_tasks(m: int, partitions: Sequence[int], checkpoint: Any) -> set[Task]:
    kinds = {"forward": m, "recompute": checkpointed(checkpoint, m), "backward": m}
    return {task for kind, count in kinds.items() for task in tasks(kind, count, partitions)}


@pytest.mark.parametrize("batch, chunks, m", [(8, 1, 1), (8, 4, 4), (13, 8, 7)])
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2], [2, 1]], ids=str)
def test_every_task_once_and_in_order(
    balance: list[int], batch: int, chunks: int, m: int, way: dict[str, Any]
) -> None:
    model, log, partitions = observed(balance, chunks, way)
    expected = expected_tasks(m, partitions, way["checkpoint"])
    for _ in range(2):
        log.started.clear()
        log.ended.clear()
        y = model(torch.randn(batch, 4))
        assert set(log.started) == set(log.ended) == tasks("forward", m, partitions)
        y.sum().backward()
        assert max(Counter(log.started).values()) == 1
        assert set(log.started) == set(log.ended) == expected
    at: dict[Any, int] = {task: k for k, task in enumerate(log.ended)}
    for i, j in product(range(m), partitions):
        before = [(i, j - 1)] * (j - 1 in partitions) + [(i - 1, j)] * (i > 0)
        assert all(at[Task("forward", *task)] < at["forward", i, j] for task in before)
        assert all(at["backward", i, j] < at[Task("backward", *task)] for task in before)
        assert at.get(("recompute", i, j), -1) < at["backward", i, j]
    if sum(balance) == 6:
        count, owner = (
            checkpointed(way["checkpoint"], m),
            [j for j, n in enumerate(balance) for _ in range(n)],
        )
        assert log.seen == {
            (k, task, task.kind == "forward" and task.micro_batch < count, task.kind == "recompute")
            for task, k in product(expected, range(6))
            if owner[k] == task.partition
        }


@pytest.mark.parametrize("mode", ["no_grad", "frozen"])
def test_only_forwards_without_gradients(mode: str, way: dict[str, Any]) -> None:
    model, log, partitions = observed([2, 4], 4, way)
    model.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(torch.randn(8, 4))
    assert Counter(log.started) == Counter(tasks("forward", 4, partitions))


@pytest.mark.parametrize("name", NAMED)
def test_a_step_does_what_its_schedule_says(name: str, way: dict[str, Any]) -> None:
    """On each device, or this rank; in one thread, in the order of the replay. `model(x)` does forwards alone."""
    v, log, engine = len(make(name, 1, 1).placement), Log(), way["engine"]
    model = piped(
        nn.Sequential(*(linear() for _ in range(2 * v))), [1] * 2 * v, 3, v=v, schedule=name, **way
    )
    model.observer = log
    made = schedule = make(name, 2, 3, v)
    if engine == "graph":
        schedule = Schedule(name, [0] * 2 * v, [made.replay().order])
    devices = [model.rank] if engine == "ranks" else range(len(schedule.lists))

    def seen() -> list[list[Action]]:
        found, log.started = [Action(*task) for task in log.started], []
        return [
            [action for action in found if schedule.placement[action.stage] == d] for d in devices
        ]

    model.step(lambda y, t: y.square().sum(), torch.rand(3, 4), None, reduction="sum")
    whole = make(schedule, len(schedule.lists), 3, checkpoint=way["checkpoint"])
    assert seen() == [[*whole.lists[d]] for d in devices]
    y = model(torch.rand(3, 4))
    first, then = (
        [[x for x in whole.lists[d] if (x.kind == "forward") == is_first] for d in devices]
        for is_first in (1, 0)
    )
    assert seen() == (
        [*orders(arranged(name, 2 * v, 2), 3, "never", False).forwards]
        if engine == "graph"
        else first
    )
    y.square().sum().backward()
    assert engine == "graph" or seen() == then

    how = "weights of 1 products later" if name.startswith("ZB") else f"whole: {name} splits none"
    places = [(s, d) for s, d in enumerate(made.placement) if engine != "ranks" or d in devices]
    where = "rank" if engine == "ranks" else "device"
    assert model.schedule.report().split("\n") == [
        f"stage {s} on {where} {d}: {how}" for s, d in places
    ]


def test_copies_between_devices_belong_to_the_sender() -> None:
    model = GPipe(nn.Sequential(linear(), linear()), [1, 1], devices=["cpu", "meta"], chunks=2)
    log = model.observer = Log()
    with torch.no_grad():
        model(torch.randn(4, 4))
    assert [task for task in log.ended if task.kind == "copy"] == [
        Task("copy", i, 0) for i in range(2)
    ]


CHUNKS, X = 3, torch.ones(6, 4)


def recording_of(n: int, **way: Any) -> tuple[Any, Any]:
    """Return the model to call, and the pipeline to record."""
    model = piped(
        nn.Sequential(*(nn.Sequential(linear(), Fails()) for _ in range(n))), [1] * n, CHUNKS, **way
    )
    return model, model._pipeline if way["engine"] == "ranks" else model


@pytest.mark.parametrize("ahead", [0, 1000])
@pytest.mark.parametrize("n", [2, 3])
def test_all_partitions_on_one_clock(
    n: int, ahead: int, way: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    model, recorded = recording_of(n, **way)
    first, clock = getattr(model, "rank", 0), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead * first)
    step(model, X)
    with record(recorded, tmp_path / "t.json") as recording:
        for _ in range(2):
            step(model, X)
    assert recorded.observer is None and len(recording.steps) == 2
    assert (recording.clock_error > 0) == (way["engine"] == "ranks") and recording.clock_error < 100
    slack = 2 * recording.clock_error
    for timeline in recording.steps:
        found = {event[:3]: event for event in timeline.events}
        assert set(found) == expected_tasks(CHUNKS, range(n), way["checkpoint"]) and len(
            timeline.events
        ) == len(found)
        for i, j in product(range(CHUNKS), range(n - 1)):
            assert found["forward", i, j].end <= found["forward", i, j + 1].start + slack
            assert found["backward", i, j + 1].end <= found["backward", i, j].start + slack
        assert 0 <= timeline.bubble < 1 and 0 < timeline.seconds < 100
    row = "rank" if way["engine"] == "ranks" else "partition"
    assert f"({row} 0 " in str(recording) and f", {row} {n - 1} " in str(recording)
    assert ("clocks agree to" in str(recording)) == (row == "rank")

    assert [path.name for path in tmp_path.iterdir()] == ([] if first else ["t.json"])
    if not first:
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        kinds = Counter(
            event["cat"] for event in events if event["ph"] == "X" and event["cat"] != "bubble"
        )
        assert kinds == Counter(
            event.kind for timeline in recording.steps for event in timeline.events
        )


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_failure_leaves_no_file(when: str, way: dict[str, Any], tmp_path: Path) -> None:
    model, recorded = recording_of(2, **way)
    step(model, X)
    with pytest.raises(ZeroDivisionError), record(recorded, tmp_path / "t.json"):
        model[1][1].fail(when, ZeroDivisionError())
        step(model, X)
    assert recorded.observer is None and not [*tmp_path.iterdir()]
