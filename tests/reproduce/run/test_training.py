"""Training: a row's settings are used, and rows of one experiment get the same data."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import EQUAL_LAYERS, PLANNED, Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe import GPipe
from torchgpipe.plan import plan
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
    assert data.input(small, DEVICE).shape == (4, 3, 224, 224) and data.target(small, DEVICE).shape == (4,)
    assert torch.equal(FakeData([small], seed=3).target(small, DEVICE), data.target(small, DEVICE))
    assert not torch.equal(FakeData([small], seed=4).input(small, DEVICE), data.input(small, DEVICE))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_row_may_defer_batch_norm(deferred: bool) -> None:
    model = make(replace(NAIVE, chunks=2, deferred_batch_norm=deferred)).model
    assert any(isinstance(layer, DeferredBatchNorm) for layer in model.modules()) == deferred


def test_configurations_train_the_same_where_micro_batches_do_not_matter() -> None:
    """One micro-batch, so that batch norm sees the same samples: naive, checkpoint-only and GPipe must agree."""
    alone = replace(NAIVE, partitions=1, balance=(9,), checkpoint="always")
    losses = []
    for row in (PLAIN, NAIVE, replace(NAIVE, checkpoint="except_last"), alone):
        training, emulated = make(row), Emulation(row, CPU, FakeData([row], 0), Balancer(CPU), 0)
        assert isinstance(training.model, nn.Sequential if row is PLAIN else GPipe)
        losses.append([float(training.step()) for _ in range(4)])
        losses.append([emulated.run().value for _ in range(4)])
        trained = [*training.model.parameters(), *emulated.training.model.parameters()]
        assert all(parameter.grad is None for parameter in trained)
    assert losses[0][-1] < losses[0][0], "the same mini-batch is learnt by heart"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)


def test_balances_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Mock(return_value=[1.0, 1.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("reproduce.run.training.profile_times", profile)
    rows = [replace(NAIVE, balance=None, chunks=m, partitions=n) for n in (2, 3) for m in (1, 4)]
    data, balancer = FakeData(rows, 0), Balancer(CPU)
    model = NAIVE.sized.layers()
    found = [balancer.balanced(row, model, data).balance for row in (*rows, NAIVE)]
    assert found == [(3, 2), (3, 2), (2, 2, 1), (2, 2, 1), (4, 5)]
    assert [len(call.args[1]) for call in profile.call_args_list] == [1], "of a quarter of the batch"


def test_a_planned_balance_is_of_the_whole_row_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=plan)
    monkeypatch.setattr("reproduce.run.training.plan", spy)
    unet = EXPERIMENTS["unet-speed"].scale("small").rows[0]
    unet = replace(unet, size=(1, 2), input_shape=(3, 64, 64), equal="model", configuration=PLANNED)
    row = replace(unet, batch_size=8, chunks=8, checkpoint="always", balance=None)
    balancer, data = Balancer(CPU), FakeData([row], 0)
    for n in (2, 4):
        emulation = Emulation(replace(row, partitions=n), CPU, data, balancer, 0)
        balance = emulation.row.balance or ()
        assert len(balance) == n and sum(balance) == 65 and balance == emulation.training.row.balance
        assert emulation.training.row.chunks == 4
    spy.assert_called_once()
    assert {"batch_size": 8, "chunks": 8, "checkpoint": "always"}.items() <= spy.call_args.kwargs.items()


@pytest.mark.parametrize(("n", "balance"), [(1, (9,)), (2, (5, 4)), (4, (3, 2, 2, 2))])
def test_equal_layers(n: int, balance: tuple[int, ...]) -> None:
    row = replace(NAIVE, configuration=EQUAL_LAYERS, partitions=n, balance=None)
    layers = nn.Sequential(*map(nn.Linear, [1] * 9, [1] * 9))
    assert Balancer(CPU).balanced(row, layers, FakeData([row], 0)).balance == balance
