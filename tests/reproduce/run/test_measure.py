"""Timing: rounds hold every row once, in changing order; a row that fails is left out, and the rest go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from reproduce.machine.devices import Devices
from reproduce.run.measure import in_turn

CPU = Devices("cpu", 1, threads=1)


class Fake:
    """Stand in for a training."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.steps = 0
        self.fails_at = fails_at
        self.error = error

    def step(self) -> torch.Tensor:
        if self.steps == self.fails_at:
            raise self.error or RuntimeError("broken")
        self.steps += 1
        return torch.tensor(float(self.steps))


def run(trainings: dict[str, Any], rounds: int, **options: Any) -> list[Any]:
    return list(in_turn(trainings, CPU, rounds=rounds, seed=options.pop("seed", 0), **options))


def test_a_round_is_one_step_of_every_row() -> None:
    samples = run({name: Fake() for name in "abcd"}, 6)
    rounds = [samples[i : i + 4] for i in range(0, 24, 4)]
    for number, samples in enumerate(rounds):
        assert {sample.row for sample in samples} == set("abcd")
        assert {sample.round for sample in samples} == {number}
        assert all(sample.seconds > 0 and sample.loss == number + 1 for sample in samples)
    assert len({tuple(sample.row for sample in samples) for samples in rounds}) > 1, "the order changes"


def test_the_seed_gives_the_order() -> None:
    def order(seed: int) -> list[str]:
        return [sample.row for sample in run({name: Fake() for name in "abcdef"}, 4, seed=seed)]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("broken"), "failed"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError(), "out of memory"),
    ],
)
def test_a_row_that_fails_is_left_out(error: Exception, status: str) -> None:
    samples = run({"good": Fake(), "bad": Fake(fails_at=2, error=error)}, 5)
    bad = [sample for sample in samples if sample.row == "bad"]
    assert [sample.failure is None for sample in bad] == [True, True, False]
    assert bad[-1].failure.status == status
    assert math.isnan(bad[-1].seconds)
    assert [sample.round for sample in samples if sample.row == "good"] == [0, 1, 2, 3, 4]


def test_stops_when_it_is_enough() -> None:
    asked: list[int] = []
    samples = run({"a": Fake(), "b": Fake()}, 9, enough=lambda done: asked.append(done) or done == 3)
    assert asked == [1, 2, 3]
    assert len(samples) == 6


def test_tells_what_comes_next() -> None:
    told: list[tuple[int, str]] = []
    samples = run({"a": Fake(), "b": Fake()}, 3, before=lambda done, row: told.append((done, row)))
    assert told == [(sample.round, sample.row) for sample in samples]
