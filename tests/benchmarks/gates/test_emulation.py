"""Emulated steps beside measured ones: a real run, the order of tasks exactly, and what sharing adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gates import emulation
from benchmarks.gates.emulation import OwnRow, Subject, errors, main, settled, table, watched
from benchmarks.harness import summarized
from reproduce.experiments import Optimizer
from reproduce.records.record import Record, Result, load
from reproduce.run.timed import record_step
from torchgpipe.plan.replay import Costs, Event, replay


def tiny() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))


SGD = Optimizer(name="SGD", options={"lr": 0.1}, state=0)
BASE = OwnRow(name="m=3 always", model="tiny", size=(), input_shape=(64,), batch_size=12, num_classes=10, optimizer=SGD,
              loss="cross_entropy", partitions=2, balance=(3, 5), checkpoint="always", chunks=3)  # fmt: skip
OTHER = replace(BASE, name="m=1 never", chunks=1, checkpoint="never")


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emulation.OWN, "tiny", tiny)
    monkeypatch.setattr(emulation, "MODELS", {"tiny": [BASE, OTHER]})


def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        main(["--rounds", "2", "--json", str(tmp_path / "result.json")])
    finally:
        torch.set_num_threads(threads)
    kept = load(tmp_path / "result.json")
    assert table(kept) in capsys.readouterr().out
    assert [result.row for result in kept.results] == ["m=3 always", "m=1 never"]
    for result in kept.results:
        counts = {name: count for name, (*_, count) in result.values["spread"].items()}
        assert counts == {**dict.fromkeys(emulation.WAYS, 2), "planned": emulation.PROFILES}
        assert result.values["hand_over"] > 0


def order(events: Sequence[Event], together: bool) -> list[list[tuple[str, int, int]]]:
    """Return each partition's tasks in the order in which they start; of all partitions where they take turns."""
    tasks: list[tuple[str, int, int]] = [
        (event.kind, event.micro_batch, event.partition) for event in sorted(events, key=lambda each: each.start)
    ]
    return [[task for task in tasks if task[2] == j] for j in range(3)] if together else [tasks]


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("balance", [(8,), (3, 5), (2, 3, 3)])
def test_the_replay_runs_tasks_in_the_order_of_a_real_run(balance: tuple[int, ...], chunks: int, mode: str) -> None:
    row = replace(BASE, balance=balance, partitions=len(balance), chunks=chunks, checkpoint=mode)  # type: ignore[arg-type]
    subject = Subject(row)
    emulated = subject.emulation.step([subject.emulation.run()]).timeline
    real = record_step(subject.training, subject.devices)
    assert order(emulated.tasks, chunks > 1) == order(real.tasks, chunks > 1)


ONES = [[1.0, 1.0]] * 4
NONE = [[0.0, 0.0]] * 4


@pytest.mark.parametrize(
    ("shared", "hand_over", "low", "high"),
    [
        (1.0, 0.0, 10.0, 10.0),  # nothing is slower: forward and backward of 4 tasks and a bubble of 1 each
        (2.0, 0.0, 16.0, 19.0),  # all but the first and the last task of each half overlap
        (0.5, 0.0, 10.0, 10.0),  # noise never makes a task quicker
        (1.0, 0.1, 10.2, 10.2),  # one hand-over in each half is on the critical path
    ],
)
def test_sharing_slows_down_what_overlaps(shared: float, hand_over: float, low: float, high: float) -> None:
    alone = Costs(ONES, ONES, NONE)
    slower = [[shared, shared]] * 4
    slow = Costs(slower, slower, NONE)
    assert low - 1e-9 <= settled(alone, slow, hand_over).seconds <= high + 1e-9
    assert replay(alone).seconds == 10.0


def test_watching_takes_time_in_the_first_micro_batch_of_several() -> None:
    assert replay(watched(Costs(ONES, ONES, NONE), 1.5)).seconds == 11.0, "both partitions' first tasks are on the way"
    alone = Costs(ONES[:1], ONES[:1], NONE[:1])
    assert watched(alone, 1.5) == alone


def test_errors_are_of_medians() -> None:
    samples = {"measured": [2.0, 9.0, 2.0], "emulated": [1.0, 1.0, 8.0], "with sharing": [2.5] * 3, "planned": [4.0]}
    result = Result("a", "m=1", "measured", samples=samples)
    found = errors(Record("emulation", "", "measured", {}, [summarized(result)]))
    assert found == {"a m=1": {"emulated": -0.5, "with sharing": 0.25, "as plan predicts": 1.0}}
