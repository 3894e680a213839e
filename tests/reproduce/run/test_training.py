"""Training: a row's settings are used, rows of one experiment get the same data, and every live byte counts once."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import EQUAL_LAYERS, PLANNED, Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Emulation
from reproduce.run.live_bytes import LiveBytes, LiveBytesMode
from reproduce.run.peak import measure_peak
from reproduce.run.training import Balancer, FakeData, Training
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.plan import plan

CPU = Devices("cpu", 2, threads=1)
DEVICE = torch.device("cpu")
SPEED = EXPERIMENTS["amoebanet-speed"]
NAIVE = replace(
    next(row for row in SPEED.scale("small").rows if row.name == "naive n2"),
    size=(3, 16),
    batch_size=4,
    balance=(4, 5),
)
PLAIN = replace(NAIVE, partitions=None, chunks=None, checkpoint=None, balance=None)
FLOAT = 4
LIVE = replace(EXPERIMENTS["amoebanet-memory"].scale("small").rows[0], size=(3, 16), batch_size=4)


def make(row: Row) -> Training:
    return Training(row, CPU, FakeData([row], 0), Balancer(CPU), 0)


def test_rows_share_data() -> None:
    large, small = replace(NAIVE, batch_size=6), NAIVE
    data = FakeData([small, large], seed=3)
    assert (
        torch.equal(data.input(large, DEVICE)[:4], data.input(small, DEVICE))
        and len(data.input(large, DEVICE)) == 6
    )
    assert data.input(large, DEVICE).data_ptr() == data.input(small, DEVICE).data_ptr()
    assert data.input(small, DEVICE).shape == (4, 3, 224, 224) and data.target(
        small, DEVICE
    ).shape == (4,)
    assert torch.equal(FakeData([small], seed=3).target(small, DEVICE), data.target(small, DEVICE))
    assert not torch.equal(
        FakeData([small], seed=4).input(small, DEVICE), data.input(small, DEVICE)
    )


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
    assert [len(call.args[1]) for call in profile.call_args_list] == [1], (
        "of a quarter of the batch"
    )


def test_a_planned_balance_is_of_the_whole_row_and_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Mock(side_effect=plan)
    monkeypatch.setattr("reproduce.run.training.plan", spy)
    unet = EXPERIMENTS["unet-speed"].scale("small").rows[0]
    unet = replace(unet, size=(1, 2), input_shape=(3, 64, 64), equal="model", configuration=PLANNED)
    row = replace(unet, batch_size=8, chunks=8, checkpoint="always", balance=None)
    balancer, data = Balancer(CPU), FakeData([row], 0)
    for n in (2, 4):
        emulation = Emulation(replace(row, partitions=n), CPU, data, balancer, 0)
        balance = emulation.row.balance or ()
        assert (
            len(balance) == n and sum(balance) == 65 and balance == emulation.training.row.balance
        )
        assert emulation.training.row.chunks == 4
    spy.assert_called_once()
    assert {
        "batch_size": 8,
        "chunks": 8,
        "checkpoint": "always",
    }.items() <= spy.call_args.kwargs.items()


@pytest.mark.parametrize(("n", "balance"), [(1, (9,)), (2, (5, 4)), (4, (3, 2, 2, 2))])
def test_equal_layers(n: int, balance: tuple[int, ...]) -> None:
    row = replace(NAIVE, configuration=EQUAL_LAYERS, partitions=n, balance=None)
    layers = nn.Sequential(*map(nn.Linear, [1] * 9, [1] * 9))
    assert Balancer(CPU).balanced(row, layers, FakeData([row], 0)).balance == balance


def gradient() -> object:
    x = torch.zeros(50, requires_grad=True)
    x.sum().backward()
    return x, x.grad


KNOWN: dict[str, tuple[Callable[[], object], int, int]] = {
    "a view": (lambda: torch.zeros(100).view(10, 10)[2:4].t(), 100 * FLOAT, 100 * FLOAT),
    "temporary": (lambda: torch.zeros(100) + 1 + 1, 100 * FLOAT, 200 * FLOAT),
    "in place": (lambda: torch.zeros(100).add_(1), 100 * FLOAT, 100 * FLOAT),
    "grows": (lambda: torch.zeros(1).resize_(100), 100 * FLOAT, 100 * FLOAT),
    "several at once": (
        lambda: (torch.zeros(100).max(dim=0, keepdim=True), torch.zeros(98)),
        (98 + 1) * FLOAT + 8,
        (100 + 1) * FLOAT + 8,
    ),
    # The leaf and both results of exp are alive, the sum is not.
    "saved": (
        lambda: (torch.zeros(50, requires_grad=True).exp() + 1).exp(),
        150 * FLOAT,
        200 * FLOAT,
    ),
    "gradient": (gradient, 100 * FLOAT, 102 * FLOAT),  # plus, at the peak, the sum and its gradient
}


@pytest.mark.parametrize(("make", "live", "peak"), KNOWN.values(), ids=KNOWN)
def test_known_cases(make: Callable[[], object], live: int, peak: int) -> None:
    counter = LiveBytes(1)
    with LiveBytesMode(counter, 0):
        kept = make()
    assert (counter.live, counter.peak) == ([live], [peak])
    del kept
    gc.collect()
    assert counter.live == [0]


def test_outside_tasks_a_tensor_belongs_where_it_was_made_from() -> None:
    counter = LiveBytes(2)
    parameter = torch.zeros(10)
    counter.add([parameter], 1)
    with LiveBytesMode(counter):
        state = torch.zeros_like(parameter)
        other = torch.zeros(3)
        assert counter.live == [3 * FLOAT, 20 * FLOAT]
        with LiveBytesMode(counter, 0):
            made = torch.zeros_like(parameter)
        assert counter.live == [13 * FLOAT, 20 * FLOAT], (
            "what a task makes is its device's, whatever it is made from"
        )
    del state, other, made


def test_a_training_has_its_state_and_at_its_peak_its_gradients_and_what_layers_keep() -> None:
    devices, peaks = Devices("cpu", 2, threads=1), {}
    pipeline = replace(LIVE, partitions=2, chunks=4, balance=(4, 5))
    for row in (
        LIVE,
        *(replace(pipeline, checkpoint=mode) for mode in ("never", "always", "except_last")),
    ):
        counter = LiveBytes(row.devices)
        training = Training(row, devices, FakeData([row], 0), Balancer(devices), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reproduce.run.peak.LiveBytes", lambda n, counter=counter: counter)
            found = measure_peak(training, devices, steps=2)["peak_allocated"]
        peaks[row.checkpoint] = sum(found)
        gc.collect()
        state: Any = training.optimizer.state
        own = [0] * row.devices
        own[0] += training.input.nbytes
        own[-1] += training.target.nbytes
        own[0] += sum(
            values["step"].nbytes for values in state.values()
        )  # of no tensor: on the first device
        for j, partition in enumerate(training.partitions):
            parameters = [*partition.parameters()]
            kept = [
                *parameters,
                *partition.buffers(),
                *(state[each]["square_avg"] for each in parameters),
            ]
            assert counter.live[j] == sum(tensor.nbytes for tensor in kept) + own[j]
            # Parameters, gradients and optimizer state, and 2 to 40 MiB of activations per sample.
            assert (
                2 * 2**20 < found[j] - 3 * sum(each.nbytes for each in parameters) < 4 * 40 * 2**20
            )
    assert max(peaks["always"], peaks["except_last"]) < min(peaks["never"], peaks[None])
