"""Engines: they compute the same, their processes end, and a row that an engine cannot run has a reason."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reproduce.error import Error
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.records.record import OFFERED, Engine
from reproduce.run.engines.engines import FEW, Trainer, check_same, why_not
from reproduce.run.engines.processes import Processes
from reproduce.run.timed import MeasuredSteps
from torchgpipe.plan.replay import Event, Timeline

from ...library.ledger import assert_eventually
from ..tiny import TINY
from .works import failing, ids, killed, work

CPU = Devices("cpu", 2, threads=1)
ROW, UNET = (
    next(
        row for row in EXPERIMENTS[f"{model}-speed"].scale("small").rows if row.name == "GPipe n2m4"
    )
    for model in ("amoebanet", "unet")
)


def assert_gone(ids: list[int]) -> None:
    assert len(ids) == 2
    assert_eventually(lambda: not any(Path(f"/proc/{each}").exists() for each in ids), lambda: ids)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with closing(Processes(2)) as processes:
        yield processes
        started = ids(processes)
    assert_gone(started)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("engine", ["ranks", "ScheduleGPipe", "Schedule1F1B"])
def test_every_engine_trains_alike(processes: Processes, engine: Engine, checkpoint: Any) -> None:
    """Gradients included: another factor would show in the loss after the first update. Ranks draw what threads do."""
    make = partial(work, checkpoint, dropout=0.5 if engine == "ranks" else 0.0)
    threads, steps = Trainer("threads", make()), []
    processes.make(engine, make)
    measured = MeasuredSteps(ROW, lambda: (1.0, threads.step() or 0.0))
    for _ in range(3):
        measured.run()
        torch.rand(5)  # as if another row drew random numbers
        steps.append(processes.step())
    seconds, losses = zip(*steps, strict=True)
    assert losses == pytest.approx(measured.losses, rel=1e-5) and abs(losses[0] - losses[1]) > 1e-3
    assert 0 < min(seconds) < max(seconds) < 60
    if engine == "ranks":
        timeline = processes.record()
        counts = {"forward": 2, "recompute": int(checkpoint == "except_last"), "backward": 2}
        found = Counter((event.kind, event.partition) for event in timeline.events)
        assert found == +Counter(
            {(kind, j): count for kind, count in counts.items() for j in range(2)}
        )
        assert timeline.partitions == 2 and 0 < timeline.window[1] <= timeline.seconds < 60


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
    with closing(Processes(2)) as processes, pytest.raises(Error, match=said):
        processes.make(engine, make)
        for _ in range(2):
            processes.step()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_asks(sent: signal.Signals, start: Any) -> None:
    asking = start("-m", "tests.reproduce.run.works")
    started = [int(each) for each in asking.stdout.readline().split()]
    assert all(Path(f"/proc/{each}").exists() for each in started)
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
    ],
)
def test_what_an_engine_cannot_run(engines: str, row: Any, why: str | None) -> None:
    assert {why_not(engine, row, CPU) for each in engines.split() for engine in OFFERED[each]} == {
        why
    }
    assert why_not("ranks", ROW, Devices("cuda", 2)) == "processes are measured on CPUs only"
    few = replace(ROW, chunks=1)
    assert (why_not("ScheduleGPipe", few, CPU), why_not("Schedule1F1B", few, CPU)) == (None, FEW)


@pytest.mark.parametrize(("ours", "theirs"), [([1.0, 2.0], [1.0, 2.01]), ([float("nan")], [1.0])])
def test_other_losses_are_of_other_work(ours: list[float], theirs: list[float]) -> None:
    for same in (theirs, [each * 1.00001 for each in theirs], [*theirs, 3.0], []):
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
        made.append(Mock(**{"step.return_value": (0.5, loss), "record.return_value": timeline}))
        return made[-1]

    monkeypatch.setattr("reproduce.run.speed.Processes", processes)
    rows = tuple(
        row
        for row in TINY["tiny-speed"].scale("small").rows
        if row.name in ("naive n2", "GPipe n8m4")
    )
    options = [
        "--engine=threads",
        "--engine=ranks",
        "--engine=torch",
        "--no-emulate",
        f"--trace={run.folder}/t/t.png",
    ]
    found = run("tiny-speed", *options, "--steps=3", rows=rows, warmup=1, status=2 * (loss != 1.0))
    assert [each.close.call_count for each in made] == [1, 1], "ranks, and PyTorch's first schedule"
    assert found["naive n2"].samples["loss"] == [1] * 3, "others are compared with it"
    assert found["naive n2 Schedule1F1B"].reason == FEW
    assert {result.status for name, result in found.items() if "GPipe n8m4" in name} == {
        "needs devices"
    }
    ranks = found["naive n2 ranks"]
    if loss == 1.0:
        assert ranks.samples == {
            "step_time": [0.5] * 3,
            "loss": [1] * 3,
            "round": found["naive n2"].samples["round"],
        }
        assert sum(ranks.config["balance"]) == 9 and ranks.values == {
            "utilization": [0.5, 0.0],
            "bubble": 0.5,
        }
        traces = {path.name for path in run.folder.glob("t/*.json")}
        assert traces == {"t-naive-n2-ranks.json"}, "what stands in for threads cannot be watched"
    else:
        assert ranks.status == "failed"
        assert ranks.reason == (
            "naive n2, measured with ranks: the losses are [1.5], but [1.0] on another engine"
        )
