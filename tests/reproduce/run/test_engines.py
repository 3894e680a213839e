"""Engines: they train alike, where processes are used these end, and what an engine cannot run says why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS, Experiment
from reproduce.machine.devices import Devices
from reproduce.records.record import Engine, load
from reproduce.run.engines.engines import OFFERED, Engaged, check_same, why_not
from reproduce.run.engines.processes import Processes
from reproduce.run.timed import MeasuredSteps
from torchgpipe.plan.replay import Event, Timeline
from torchgpipe.tensors.observe import Task

from .fakes import Fake, Run
from .works import failing, ids, killed, work

PATIENCE = 60  # seconds; only a hang takes as long
CPU = Devices("cpu", 2, threads=1)
ROW = next(row for row in EXPERIMENTS["amoebanet-speed"].scale("small").rows if row.name == "GPipe n2m4")
UNET = next(row for row in EXPERIMENTS["unet-speed"].scale("small").rows if row.name == "GPipe n2m4")


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes(2)) as processes:
        yield processes
        started = ids(processes)
    assert len(started) == 2
    gone(started)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("engine", ["ranks", "ScheduleGPipe", "Schedule1F1B"])
def test_every_engine_trains_alike(processes: Processes, engine: Engine, checkpoint: Any) -> None:
    """Gradients included: another factor would show in the loss after the first update."""
    threads = Engaged("threads", work(checkpoint))
    processes.make(engine, partial(work, checkpoint))
    seconds, losses = zip(*(processes.step() for _ in range(3)), strict=True)
    assert losses == pytest.approx([threads.step() for _ in range(3)], rel=1e-5)
    assert losses[0] - losses[1] > 1e-3 and 0 < min(seconds) < max(seconds) < PATIENCE
    if engine == "ranks":
        timeline = processes.record()
        kinds = {"forward": 2, "recompute": int(checkpoint == "except_last"), "backward": 2}
        tasks = [Task(kind, i, j) for kind, m in kinds.items() for i in range(m) for j in range(2)]  # type: ignore[arg-type]
        assert sorted(Task(*event[:3]) for event in timeline.events) == sorted(tasks)
        assert timeline.partitions == 2 and 0 < timeline.window[1] <= timeline.seconds < PATIENCE


def test_ranks_draw_what_threads_draw(processes: Processes) -> None:
    threads, losses = Engaged("threads", work(dropout=0.5)), []
    processes.make("ranks", partial(work, dropout=0.5))
    measured = MeasuredSteps(ROW, lambda: (1.0, threads.step() or 0.0))
    for _ in range(3):
        measured.run()
        torch.rand(5)  # what another row draws
        losses.append(processes.step()[1])
    assert losses == pytest.approx(measured.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "engine", "said"),
    [
        (failing, "ranks", r"^ValueError: no such luck \(parts.py, line \d+\)$"),
        (failing, "Schedule1F1B", r"^ValueError: no such luck \(parts.py, line \d+\)$"),
        pytest.param(killed, "ranks", "^a rank's process has ended by SIGKILL$", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_told_in_a_line(make: Any, engine: Engine, said: str) -> None:
    with closing(Processes(2)) as processes:
        with pytest.raises(Error, match=said) as raised:
            processes.make(engine, make)
            for _ in range(2):
                processes.step()
        assert "\n" not in str(raised.value)


def gone(ids: list[int]) -> None:
    """Wait until none of the processes is there."""
    end = time.monotonic() + PATIENCE
    while left := [each for each in ids if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_asks(sent: signal.Signals, start: Any) -> None:
    asking = start("-m", "tests.reproduce.run.works")
    assert asking.stdout is not None
    started = [int(each) for each in asking.stdout.readline().split()]
    assert len(started) == 2 and all(Path(f"/proc/{each}").exists() for each in started)
    os.kill(asking.pid, sent)
    asking.communicate()
    gone(started)


@pytest.mark.parametrize(
    ("engines", "changes", "why"),
    [
        ("ranks torch", {}, None),
        ("ranks torch", {"partitions": None, "chunks": None}, "there is no pipeline"),
        ("ranks torch", {"partitions": 1}, "there is one partition only"),
        ("ranks torch", {"components": ()}, "only GPipe can do without a component"),
        ("ranks", {"batch_size": 13, "deferred_batch_norm": True, "chunks": 1}, None),
        ("torch", {"batch_size": 13}, "PyTorch's schedules need micro-batches of equal size"),
        ("torch", {"deferred_batch_norm": True}, "PyTorch's schedules know no deferred batch norm"),
        ("threads", {"batch_size": 13, "components": (), "partitions": None}, None),
    ],
)
def test_what_an_engine_cannot_run(engines: str, changes: dict[str, Any], why: str | None) -> None:
    found = {engine: why_not(engine, replace(ROW, **changes), CPU) for e in engines.split() for engine in OFFERED[e]}
    assert set(found.values()) == {why}


def test_skips_few_micro_batches_and_gpus_of_some_engines() -> None:
    assert [why_not(engine, UNET, CPU) for engine in OFFERED["torch"]] == ["PyTorch's schedules know no skips"] * 2
    assert why_not("ranks", UNET, CPU) is None
    few = replace(ROW, chunks=1)
    assert why_not("ScheduleGPipe", few, CPU) is None
    assert why_not("Schedule1F1B", few, CPU) == "it needs at least as many micro-batches as partitions"
    assert why_not("ranks", ROW, Devices("cuda", 2)) == "processes are measured on CPUs only"


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.00001], True),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 9.0], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([float("nan")], [float("nan")], True),
        ([float("nan")], [1.0], False),
        ([], [1.0], True),
    ],
)
def test_other_losses_are_of_other_work(ours: list[float], theirs: list[float], same: bool) -> None:
    if same:
        check_same(ours, theirs, "a row")
    else:
        with pytest.raises(Error, match=r"^a row: the losses are "):
            check_same(ours, theirs, "a row")


class Faked:
    """Stands in for processes."""

    loss: Any = 1.0
    left: int = 0

    def __init__(self, count: int) -> None:
        Faked.left += 1

    def make(self, engine: Engine, work: Any) -> None:
        Fake.order.append(engine)

    def step(self) -> tuple[float, float]:
        Fake.order.append("ranks")
        return 0.5, self.loss

    def record(self) -> Timeline:
        return Timeline([Event("forward", 0, 0, 0.0, 1.0)], 2.0, 2)

    def close(self) -> None:
        Faked.left -= 1


@pytest.mark.parametrize("loss", [1.0, 1.5])
def test_a_row_is_measured_by_each_engine(
    fake: type[Fake], run: Run, runs: Any, tiny: Mapping[str, Experiment], monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    monkeypatch.setattr("reproduce.run.speed.Processes", Faked)
    monkeypatch.setattr(Faked, "loss", loss)
    traced: list[str] = []
    rows = tuple(row for row in tiny["tiny-speed"].scale("small").rows if row.name in ("naive n2", "GPipe n8m4"))
    options = {"engines": ("threads", "ranks", "Schedule1F1B"), "emulate": 0, "trace": lambda *t: traced.append(t[1])}
    run("tiny-speed", rows=rows, warmup=1, options=options)
    (path,) = runs.folder.glob("*.json")
    found = {(each.row, each.engine): each for each in load(path).results}
    assert Faked.left == 0
    assert found["naive n2", "threads"].samples["loss"] == [1] * 3, "others are compared with it"
    ranks = found["naive n2", "ranks"]
    assert found["naive n2", "Schedule1F1B"].reason == "it needs at least as many micro-batches as partitions"
    assert {each.status for (row, _), each in found.items() if row == "GPipe n8m4"} == {"needs devices"}
    if loss == 1.0:
        assert ranks.samples["step_time"] == [0.5] * 3 and sum(ranks.config["balance"]) == 9
        assert ranks.values == {"utilization": [0.5, 0.0], "bubble": 0.5}
        assert traced == ["naive n2 ranks"], "what stands in for threads cannot be watched"
        assert ranks.samples["round"] == found["naive n2", "threads"].samples["round"]
    else:
        assert ranks.status == "failed"
        assert ranks.reason == ("naive n2, measured with ranks: the losses are [1.5], but [1.0] on another engine")
