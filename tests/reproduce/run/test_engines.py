"""Tests of the engines that `reproduce` measures: pipelines of this library and of others.

All engines must compute the same losses. Afterwards, no process that an engine has started may
still run. If an engine cannot run a configuration, the result must say why.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import PUBLISHED_BALANCE
from reproduce.machine.devices import Devices
from reproduce.records.record import OFFERED, Engine
from reproduce.run.engines.engines import FEW, ONLY_EMULATED, Trainer, check_same, why_not
from reproduce.run.engines.processes import Processes
from reproduce.run.timed import MeasuredSteps
from torchgpipe.plan.predict.replay import Event, Timeline

from ...library.ledger import assert_eventually
from ..conftest import forked_ranks
from ..tiny import TINY
from .works import failing, ids, killed, work

CPU = Devices("cpu", 2, threads=1)


def row_of(experiment: str) -> Any:
    rows = EXPERIMENTS[experiment].scale("small").rows
    (row,) = [row for row in rows if row.name == "GPipe n2m4"]
    return row


ROW, UNET = row_of("amoebanet-speed"), row_of("unet-speed")


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def assert_gone(pids: list[int]) -> None:
    one, other = pids
    assert_eventually(lambda: not runs(one) and not runs(other), lambda: pids)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with forked_ranks():
        made = Processes(2)
    with closing(made):
        yield made
        started = ids(made)
    assert_gone(started)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("engine", ["ranks", "ScheduleGPipe", "Schedule1F1B"])
def test_every_engine_trains_alike(processes: Processes, engine: Engine, checkpoint: Any) -> None:
    """Check that each engine has the losses of the engine "threads" over several steps.

    Wrong gradients would change the loss after the first update of the parameters. The engine
    "ranks" must also draw the same random numbers as the engine "threads".
    """
    make = partial(work, checkpoint, dropout=0.5 if engine == "ranks" else 0.0)
    threads = Trainer("threads", make())
    measured = MeasuredSteps(ROW, lambda: (1.0, threads.step() or 0.0))
    processes.make(engine, make)

    all_seconds, losses = [], []
    for _ in range(3):
        measured.run()
        torch.rand(5)  # as if another row drew random numbers
        seconds, loss = processes.step()
        all_seconds.append(seconds)
        losses.append(loss)

    assert losses == pytest.approx(measured.losses, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3
    assert 0 < min(all_seconds) < max(all_seconds) < 60
    if engine == "ranks":
        timeline = processes.record()
        kinds = ["forward"] * 2 + ["backward"] * 2
        if checkpoint == "except_last":
            kinds.append("recompute")
        for partition in (0, 1):
            found = [event.kind for event in timeline.events if event.partition == partition]
            assert Counter(found) == Counter(kinds)
        assert len(timeline.events) == 2 * len(kinds)
        assert timeline.partitions == 2
        _, end = timeline.window
        assert 0 < end <= timeline.seconds < 60


@pytest.mark.parametrize(
    ("make", "engine", "said"),
    [
        (failing, "ranks", r"^ValueError: no such luck \(parts.py, line \d+\)$"),
        (failing, "Schedule1F1B", r"^ValueError: no such luck \(parts.py, line \d+\)$"),
        pytest.param(
            killed, "ranks", "^a rank's process has ended by SIGKILL$", marks=pytest.mark.slow
        ),
    ],
)
def test_a_failure_is_told_in_a_line(make: Any, engine: Engine, said: str) -> None:
    forked = nullcontext() if engine == "ranks" else forked_ranks()
    with forked, closing(Processes(2)) as processes, pytest.raises(Error, match=said):
        processes.make(engine, make)
        for _ in range(2):
            processes.step()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_asks(sent: signal.Signals, start: Any) -> None:
    asking = start("-m", "tests.reproduce.run.works")
    started = [int(pid) for pid in asking.stdout.readline().split()]
    assert all(map(runs, started))
    os.kill(asking.pid, sent)
    asking.communicate()
    assert_gone(started)


@pytest.mark.parametrize(
    ("engines", "row", "why"),
    [
        ("ranks torch", ROW, None),
        ("ranks torch", replace(ROW, partitions=None, chunks=None), "there is no pipeline"),
        ("ranks torch", replace(ROW, partitions=1), "there is one partition only"),
        ("ranks torch", replace(ROW, components=()), "only GPipe can do without a component"),
        ("ranks", replace(ROW, batch_size=13, deferred_batch_norm=True, chunks=1), None),
        (
            "torch",
            replace(ROW, batch_size=13),
            "PyTorch's schedules need micro-batches of equal size",
        ),
        (
            "torch",
            replace(ROW, deferred_batch_norm=True),
            "PyTorch's schedules know no deferred batch norm",
        ),
        ("torch", UNET, "PyTorch's schedules know no skips"),
        ("ranks", UNET, None),
        ("threads", replace(ROW, batch_size=13, components=(), partitions=None), None),
        ("threads ranks torch", replace(ROW, configuration=PUBLISHED_BALANCE), ONLY_EMULATED),
    ],
)
def test_what_an_engine_cannot_run(engines: str, row: Any, why: str | None) -> None:
    for offered in engines.split():
        for engine in OFFERED[offered]:
            assert why_not(engine, row, CPU) == why
    assert why_not("ranks", ROW, Devices("cuda", 2)) == "processes are measured on CPUs only"
    few = replace(ROW, chunks=1)
    assert why_not("ScheduleGPipe", few, CPU) is None
    assert why_not("Schedule1F1B", few, CPU) == FEW


@pytest.mark.parametrize(("ours", "theirs"), [([1.0, 2.0], [1.0, 2.01]), ([float("nan")], [1.0])])
def test_other_losses_are_of_other_work(ours: list[float], theirs: list[float]) -> None:
    rounded = [loss * 1.00001 for loss in theirs]
    for same in (theirs, rounded, [*theirs, 3.0], []):
        check_same(theirs, same, "a row")
    check_same([1.0, 2.0, 3.0], [1.0, 2.0, 9.0], "rounding grows")
    check_same([float("nan")], [float("nan")], "a row")
    with pytest.raises(Error, match=r"^a row: the losses are "):
        check_same(ours, theirs, "a row")


@pytest.mark.parametrize("loss", [1.0, 1.5])
@pytest.mark.usefixtures("fake")
def test_a_row_is_measured_by_each_engine(
    run: Any, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    made: list[Mock] = []

    def processes(count: int) -> Mock:
        timeline = Timeline([Event("forward", 0, 0, 0.0, 1.0)], 2.0, count)
        stand_in = Mock()
        stand_in.step.return_value = 0.5, loss
        stand_in.record.return_value = timeline
        made.append(stand_in)
        return stand_in

    monkeypatch.setattr("reproduce.run.speed.Processes", processes)
    names = ("naive n2", "GPipe n8m4")
    rows = [row for row in TINY["tiny-speed"].scale("small").rows if row.name in names]
    options = "--engine=threads --engine=ranks --engine=torch --no-emulate --steps=3"
    trace = f"--trace={run.folder}/t/t.png"
    status = 0 if loss == 1.0 else 2

    found = run("tiny-speed", *options.split(), trace, rows=tuple(rows), warmup=1, status=status)

    of_ranks, of_schedule = made
    of_ranks.close.assert_called_once()
    of_schedule.close.assert_called_once()
    threads, ranks = found["naive n2"], found["naive n2 ranks"]
    assert threads.samples["loss"] == [1] * 3, "the losses of others are compared with these"
    assert found["naive n2 Schedule1F1B"].reason == FEW
    for name, result in found.items():
        if "GPipe n8m4" in name:
            assert result.status == "needs devices"
    if loss == 1.0:
        rounds = threads.samples["round"]
        assert ranks.samples == {"step_time": [0.5] * 3, "loss": [1] * 3, "round": rounds}
        assert sum(ranks.config["balance"]) == 9
        assert ranks.values == {"utilization": [0.5, 0.0], "bubble": 0.5}
        traces = {path.name for path in run.folder.glob("t/*.json")}
        assert traces == {"t-naive-n2-ranks.json"}, "fake threads cannot be watched"
    else:
        assert ranks.status == "failed"
        assert ranks.reason == (
            "naive n2, measured with ranks: the losses are [1.5], but [1.0] on another engine"
        )
