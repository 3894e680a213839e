"""Tests of observers, which are called for each task of a pipeline, and of recorded timelines.

An observer returns a context manager, within which the task runs. It must see each task once, in
the task's thread, and after the tasks that this task depends on. In a timeline, the times of all
ranks must be on one clock.
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
from torch import Tensor
from torch.nn import Module, Sequential

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

Way = dict[str, Any]
"""The engine and the mode of checkpointing of a pipeline."""


class Log:
    """An observer that records which tasks start and end, and which layers run in each task."""

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


class Witness(Module):
    """A layer that records in a `Log` which task is running when its forward or backward runs."""

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


def observed(balance: list[int], chunks: int, way: Way) -> tuple[Any, Log, Sequence[int]]:
    """Build a pipeline with an observer that logs tasks.

    Returns:
        The pipeline, the log, and the numbers of the partitions whose tasks the log gets. With the
        engine "ranks", a rank's log gets only the tasks of its own partition.
    """
    log = Log()
    if sum(balance) == 6:
        layers = Sequential()
        for k in range(6):
            layers.append(Witness(log, k))
    else:
        layers = only_a_skip()
    model = piped(layers, balance, chunks, **way)
    model.observer = log
    partitions = [model.rank] if way.get("engine") == "ranks" else range(len(balance))
    return model, log, partitions


def tasks(kind: Any, m: int, partitions: Sequence[int]) -> set[Task]:
    return {Task(kind, i, j) for i, j in product(range(m), partitions)}


def expected_tasks(m: int, partitions: Sequence[int], checkpoint: Any) -> set[Task]:
    found = tasks("forward", m, partitions) | tasks("backward", m, partitions)
    return found | tasks("recompute", checkpointed(checkpoint, m), partitions)


def assert_in_order(ended: list[Task], m: int, partitions: Sequence[int]) -> None:
    """Assert that each task ended after the tasks that it depends on."""
    at: dict[Any, int] = {task: k for k, task in enumerate(ended)}
    for i, j in product(range(m), partitions):
        before = []
        if j - 1 in partitions:
            before.append((i, j - 1))
        if i > 0:
            before.append((i - 1, j))
        forward, backward = at["forward", i, j], at["backward", i, j]
        for other, partition in before:
            assert at["forward", other, partition] < forward
            assert backward < at["backward", other, partition]
        assert at.get(("recompute", i, j), -1) < backward


def expected_passes(balance: list[int], tasks: set[Task], count: int) -> set[Any]:
    """Return the set of all records that the layers (`Witness`) must make in a `Log`.

    A record has the number of a layer, the task in which the layer runs, and two flags: whether the
    layer will be recomputed, and whether this is the recomputation.

    Args:
        balance: The number of layers in each partition.
        tasks: The tasks of the pipeline.
        count: The number of micro-batches that are recomputed: the first `count` ones.
    """
    expected = set()
    for task in tasks:
        first = sum(balance[: task.partition])
        is_first_pass = task.kind == "forward" and task.micro_batch < count
        for k in range(first, first + balance[task.partition]):
            expected.add((k, task, is_first_pass, task.kind == "recompute"))
    return expected


@pytest.mark.parametrize("batch, chunks, m", [(8, 1, 1), (8, 4, 4), (13, 8, 7)])
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2], [2, 1]], ids=str)
def test_every_task_once_and_in_order(
    balance: list[int], batch: int, chunks: int, m: int, way: Way
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
    assert_in_order(log.ended, m, partitions)
    if sum(balance) == 6:
        count = checkpointed(way["checkpoint"], m)
        assert log.seen == expected_passes(balance, expected, count)


@pytest.mark.parametrize("mode", ["no_grad", "frozen"])
def test_only_forwards_without_gradients(mode: str, way: Way) -> None:
    model, log, partitions = observed([2, 4], 4, way)
    model.requires_grad_(mode != "frozen")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(torch.randn(8, 4))
    assert Counter(log.started) == Counter(tasks("forward", 4, partitions))


def by_device(actions: list[Action], placement: Sequence[int], devices: Any) -> list[list[Action]]:
    """Split a list of actions (tasks in a schedule) into one list for each device."""
    found = []
    for device in devices:
        own = [action for action in actions if placement[action.stage] == device]
        found.append(own)
    return found


@pytest.mark.parametrize("name", NAMED)
def test_a_step_does_what_its_schedule_says(name: str, way: Way) -> None:
    """Check that tasks run on each device, or on each rank, in the order of the schedule.

    The engine "graph" has a single thread, which runs the tasks of all devices in the order of
    `Schedule.replay`.
    """
    v, engine = len(make(name, 1, 1).placement), way["engine"]
    layers = Sequential(*(linear() for _ in range(2 * v)))
    model = piped(layers, [1] * 2 * v, 3, v=v, schedule=name, **way)
    log = model.observer = Log()
    made = schedule = make(name, 2, 3, v)
    if engine == "graph":
        schedule = Schedule(name, [0] * 2 * v, [made.replay().order])
    devices = [model.rank] if engine == "ranks" else range(len(schedule.lists))

    def seen() -> list[list[Action]]:
        """Return, in a list for each device, the tasks that have started since the last call."""
        actions = [Action(*task) for task in log.started]
        log.started = []
        return by_device(actions, schedule.placement, devices)

    model.step(lambda y, t: y.square().sum(), torch.rand(3, 4), None, reduction="sum")
    whole = make(schedule, len(schedule.lists), 3, checkpoint=way["checkpoint"])
    assert seen() == [[*whole.lists[d]] for d in devices]
    y = model(torch.rand(3, 4))
    forwards: list[Any] = []
    others: list[Any] = []
    for d in devices:
        forwards.append([action for action in whole.lists[d] if action.kind == "forward"])
        others.append([action for action in whole.lists[d] if action.kind != "forward"])
    if engine == "graph":
        forwards = [*orders(arranged(name, 2 * v, 2), 3, "never", False).forwards]
    assert seen() == forwards
    y.square().sum().backward()
    assert engine == "graph" or seen() == others
    assert model.schedule.report().split("\n") == report(name, made.placement, engine, devices)


def report(name: str, placement: Sequence[int], engine: str, devices: Any) -> list[str]:
    """Return the expected lines of `model.schedule.report()`, one for each stage."""
    later = "weight gradients of 1 matrix products are computed later"
    how = later if name.startswith("ZB") else f"backward is not split by {name}"
    where = "rank" if engine == "ranks" else "device"
    lines = []
    for stage, device in enumerate(placement):
        if engine != "ranks" or device in devices:
            lines.append(f"stage {stage} on {where} {device}: {how}")
    return lines


def test_copies_between_devices_belong_to_the_sender() -> None:
    model = GPipe(Sequential(linear(), linear()), [1, 1], devices=["cpu", "meta"], chunks=2)
    log = model.observer = Log()
    with torch.no_grad():
        model(torch.randn(4, 4))
    copies = [task for task in log.ended if task.kind == "copy"]
    assert copies == [Task("copy", 0, 0), Task("copy", 1, 0)]


CHUNKS, X = 3, torch.ones(6, 4)


def recording_of(n: int, **way: Any) -> tuple[Any, Any]:
    """Return a model with `n` layers, and the pipeline whose tasks `record` can observe.

    In one process, the model is the pipeline itself. Over ranks, the model contains the pipeline.
    """
    layers = Sequential()
    for _ in range(n):
        layers.append(Sequential(linear(), Fails()))
    model = piped(layers, [1] * n, CHUNKS, **way)
    return model, model._pipeline if way["engine"] == "ranks" else model


def assert_on_one_clock(timeline: Any, n: int, checkpoint: Any, slack: float) -> None:
    """Assert that a timeline has each task once, and no task starts before its input is there.

    Args:
        timeline: The recorded timeline.
        n: The number of partitions.
        checkpoint: The mode of checkpointing.
        slack: The seconds by which the clocks of ranks may differ.
    """
    found = {event[:3]: event for event in timeline.events}
    assert set(found) == expected_tasks(CHUNKS, range(n), checkpoint)
    assert len(timeline.events) == len(found)
    for i, j in product(range(CHUNKS), range(n - 1)):
        before, after = found["forward", i, j], found["forward", i, j + 1]
        assert before.end <= after.start + slack
        before, after = found["backward", i, j + 1], found["backward", i, j]
        assert before.end <= after.start + slack
    assert 0 <= timeline.bubble < 1
    assert 0 < timeline.seconds < 100


def assert_written(path: Path, timelines: Any) -> None:
    """Assert that a trace file has all events of the recorded timelines."""
    written: Counter[str] = Counter()
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "bubble":
            written[event["cat"]] += 1
    expected: Counter[str] = Counter()
    for timeline in timelines:
        for event in timeline.events:
            expected[event.kind] += 1
    assert written == expected


@pytest.mark.parametrize("ahead", [0, 1000])
@pytest.mark.parametrize("n", [2, 3])
def test_all_partitions_on_one_clock(
    n: int, ahead: int, way: Way, tmp_path: Path, monkeypatch: Any
) -> None:
    model, recorded = recording_of(n, **way)
    rank, clock = getattr(model, "rank", 0), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead * rank)
    step(model, X)
    path = tmp_path / "t.json"
    with record(recorded, path) as recording:
        for _ in range(2):
            step(model, X)
    assert recorded.observer is None
    assert len(recording.steps) == 2
    on_ranks = way["engine"] == "ranks"
    assert (recording.clock_error > 0) == on_ranks
    assert recording.clock_error < 100
    for timeline in recording.steps:
        assert_on_one_clock(timeline, n, way["checkpoint"], 2 * recording.clock_error)
    row, said = "rank" if on_ranks else "partition", str(recording)
    assert f"({row} 0 " in said
    assert f", {row} {n - 1} " in said
    assert ("clocks agree to" in said) == on_ranks

    if rank == 0:
        assert [*tmp_path.iterdir()] == [path]
        assert_written(path, recording.steps)
    else:
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_failure_leaves_no_file(when: str, way: Way, tmp_path: Path) -> None:
    model, recorded = recording_of(2, **way)
    step(model, X)
    with pytest.raises(ZeroDivisionError), record(recorded, tmp_path / "t.json"):
        model[1][1].fail(when, ZeroDivisionError())
        step(model, X)
    assert recorded.observer is None
    assert not [*tmp_path.iterdir()]
