"""Training: a row becomes what it says, and rows of one experiment see the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.experiments import EQUAL_LAYERS, EXPERIMENTS, Row
from reproduce.machine.devices import Devices
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe import GPipe
from torchgpipe.task.batchnorm import DeferredBatchNorm

CPU = Devices("cpu", 2, threads=1)
DEVICE = torch.device("cpu")
SPEED = EXPERIMENTS["amoebanet-speed"]
NAIVE = replace(
    next(row for row in SPEED.scale("small").rows if row.name == "naive n2"),
    size=(3, 16), batch_size=4, balance=(4, 5),
)  # fmt: skip
PLAIN = replace(NAIVE, partitions=None, chunks=None, checkpoint=None, balance=None)


def make(row: Row) -> Training:
    return Training(row, CPU, FakeData([row], 0), Balancer(CPU), 0)


def test_rows_share_data() -> None:
    large, small = replace(NAIVE, batch_size=6), NAIVE
    data = FakeData([small, large], seed=3)
    assert torch.equal(data.input(large, DEVICE)[:4], data.input(small, DEVICE)) and len(data.input(large, DEVICE)) == 6
    assert data.input(large, DEVICE).data_ptr() == data.input(small, DEVICE).data_ptr()
    assert data.input(small, DEVICE).shape == (4, 3, 224, 224)
    assert data.target(small, DEVICE).shape == (4,)
    assert torch.equal(FakeData([small], seed=3).target(small, DEVICE), data.target(small, DEVICE))
    assert not torch.equal(FakeData([small], seed=4).input(small, DEVICE), data.input(small, DEVICE))


@pytest.mark.parametrize(
    ("changes", "balance"),
    [
        ({}, [4, 5]),
        ({"chunks": 4, "checkpoint": "except_last"}, [4, 5]),
        ({"partitions": 1, "balance": None, "chunks": 2, "checkpoint": "always"}, [9]),
        ({"chunks": 2, "deferred_batch_norm": True}, [4, 5]),
    ],
)
def test_a_pipeline_is_what_the_row_says(changes: dict[str, Any], balance: list[int]) -> None:
    row = replace(NAIVE, **changes)
    training = make(row)
    model = training.model
    assert isinstance(model, GPipe) and model.balance == list(training.row.balance or ()) == balance
    assert (model.chunks, model.checkpoint) == (row.chunks, row.checkpoint)
    assert any(isinstance(layer, DeferredBatchNorm) for layer in model.modules()) == row.deferred_batch_norm
    assert isinstance(training.optimizer, torch.optim.SGD) and training.optimizer.defaults["lr"] == 0.1


def test_configurations_train_the_same_where_micro_batches_do_not_matter() -> None:
    """One micro-batch, so that batch norm sees the same samples: naive, checkpoint-only and GPipe must agree."""
    alone = replace(NAIVE, partitions=1, balance=(9,), checkpoint="always")
    rows = [PLAIN, NAIVE, replace(NAIVE, checkpoint="except_last"), alone]
    losses = []
    for row in rows:
        training = make(row)
        assert isinstance(training.model, nn.Sequential if row is PLAIN else GPipe)
        losses.append([float(training.step()) for _ in range(4)])
        assert all(parameter.grad is None for parameter in training.model.parameters())
    assert losses[0][-1] < losses[0][0], "the same mini-batch is learnt by heart"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


def test_balances_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def profile(partitions: int, model: nn.Sequential, sample: torch.Tensor, **_: object) -> Sequence[int]:
        asked.append((partitions, tuple(sample.shape)))
        return [len(model) - partitions + 1, *[1] * (partitions - 1)]

    monkeypatch.setattr("reproduce.run.training.balance_by_time", profile)
    rows = [replace(NAIVE, balance=None, chunks=m, partitions=n) for n in (2, 3) for m in (1, 4)]
    data, balancer = FakeData(rows, 0), Balancer(CPU)
    model = NAIVE.build()
    found = [balancer.balanced(row, model, data).balance for row in (*rows, NAIVE)]
    assert found == [(8, 1), (8, 1), (7, 1, 1), (7, 1, 1), (4, 5)]
    assert asked == [(2, (1, 3, 224, 224)), (3, (1, 3, 224, 224))]


@pytest.mark.parametrize(("n", "balance"), [(1, (9,)), (2, (5, 4)), (4, (3, 2, 2, 2)), (8, (2, 1, 1, 1, 1, 1, 1, 1))])
def test_equal_layers(n: int, balance: tuple[int, ...]) -> None:
    row = replace(NAIVE, configuration=EQUAL_LAYERS, partitions=n, balance=None)
    layers = nn.Sequential(*map(nn.Linear, [1] * 9, [1] * 9))
    assert Balancer(CPU).balanced(row, layers, FakeData([row], 0)).balance == balance
