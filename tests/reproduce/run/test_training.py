"""Tests of `Training`, which builds and trains the model of a row (configuration).

A training must use the settings of its row, and all rows of an experiment get the same data. The
counter of memory must count every byte in use exactly once.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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
from torchgpipe.tensors.checkpoint import Mode

CPU = Devices("cpu", 2, threads=1)
DEVICE = torch.device("cpu")
SPEED = EXPERIMENTS["amoebanet-speed"]
(PAPER_SIZE,) = [row for row in SPEED.scale("small").rows if row.name == "naive n2"]
NAIVE = replace(PAPER_SIZE, size=(3, 16), batch_size=4, balance=(4, 5))
PLAIN = replace(NAIVE, partitions=None, chunks=None, checkpoint=None, balance=None)
FLOAT = 4
MEMORY_ROWS = EXPERIMENTS["amoebanet-memory"].scale("small").rows
LIVE = replace(MEMORY_ROWS[0], size=(3, 16), batch_size=4)


def make(row: Row) -> Training:
    return Training(row, CPU, FakeData([row], 0), Balancer(CPU), 0)


def emulate(row: Row) -> Emulation:
    return Emulation(row, CPU, FakeData([row], 0), Balancer(CPU), 0)


def test_rows_share_data() -> None:
    large, small = replace(NAIVE, batch_size=6), NAIVE
    data = FakeData([small, large], seed=3)
    alone, other_seed = FakeData([small], seed=3), FakeData([small], seed=4)

    large_input, small_input = data.input(large, DEVICE), data.input(small, DEVICE)
    target = data.target(small, DEVICE)

    assert len(large_input) == 6
    assert large_input[:4].equal(small_input)
    assert large_input.data_ptr() == small_input.data_ptr()
    assert small_input.shape == (4, 3, 224, 224)
    assert target.shape == (4,)
    assert target.equal(alone.target(small, DEVICE))
    assert not small_input.equal(other_seed.input(small, DEVICE))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_row_may_defer_batch_norm(deferred: bool) -> None:
    training = make(replace(NAIVE, chunks=2, deferred_batch_norm=deferred))
    kinds = {type(layer) for layer in training.model.modules()}
    assert (DeferredBatchNorm in kinds) == deferred


def test_configurations_train_the_same_where_micro_batches_do_not_matter() -> None:
    """Check that plain layers, naive model parallelism, checkpoint-only and GPipe get equal losses.

    With one micro-batch, batch norm sees the same samples in all four, so the losses must be equal.
    """
    alone = replace(NAIVE, partitions=1, balance=(9,), checkpoint="always")
    losses = []
    for row in (PLAIN, NAIVE, replace(NAIVE, checkpoint="except_last"), alone):
        training, emulated = make(row), emulate(row)
        model, emulated_model = training.model, emulated.training.model
        assert isinstance(model, nn.Sequential if row is PLAIN else GPipe)
        losses.append([float(training.step()) for _ in range(4)])
        losses.append([emulated.run().value for _ in range(4)])
        for parameter in (*model.parameters(), *emulated_model.parameters()):
            assert parameter.grad is None
    first, *others = losses
    assert first[-1] < first[0], "the same mini-batch is learnt by heart"
    for other in others:
        assert other == pytest.approx(first, rel=1e-3)


def test_balances_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Mock(return_value=[1.0, 1.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("reproduce.run.training.profile_times", profile)
    two, three = replace(NAIVE, balance=None), replace(NAIVE, balance=None, partitions=3)
    rows = [replace(two, chunks=1), replace(two, chunks=4)]
    rows += [replace(three, chunks=1), replace(three, chunks=4), NAIVE]
    data, balancer = FakeData(rows, 0), Balancer(CPU)
    model = NAIVE.sized.layers()

    found = [balancer.balanced(row, model, data).balance for row in rows]

    assert found == [(3, 2), (3, 2), (2, 2, 1), (2, 2, 1), (4, 5)]
    profile.assert_called_once()
    _, sample, *_ = profile.call_args.args
    assert len(sample) == 1, "a quarter of the batch"


@pytest.mark.slow
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
        trained = emulation.training.row
        assert len(balance) == n
        assert sum(balance) == 65
        assert trained.balance == balance
        assert trained.chunks == 2
    spy.assert_called_once()
    asked = spy.call_args.kwargs
    assert asked["batch_size"] == 8
    assert asked["chunks"] == 8
    assert asked["checkpoint"] == "always"


def test_a_planned_balance_may_have_more_partitions_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that `--set n=…` may ask for more partitions than an experiment has by itself."""
    planned = Mock(side_effect=lambda row, model, sample, most: {most: (1,) * most})
    monkeypatch.setattr("reproduce.run.training.planned_balances", planned)
    unet = EXPERIMENTS["unet-speed"].scale("small").rows[0]
    row = replace(unet, size=(1, 2), input_shape=(3, 64, 64), equal="model", configuration=PLANNED)
    row = replace(row, batch_size=16, chunks=16, partitions=16, balance=None)
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(16)])
    found = Balancer(CPU).balanced(row, model, FakeData([row], 0))
    assert found.balance == (1,) * 16


@pytest.mark.parametrize(("n", "balance"), [(1, (9,)), (2, (5, 4)), (4, (3, 2, 2, 2))])
def test_equal_layers(n: int, balance: tuple[int, ...]) -> None:
    row = replace(NAIVE, configuration=EQUAL_LAYERS, partitions=n, balance=None)
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    balanced = Balancer(CPU).balanced(row, layers, FakeData([row], 0))
    assert balanced.balance == balance


def gradient() -> object:
    x = torch.zeros(50, requires_grad=True)
    x.sum().backward()
    return x, x.grad


# A function that makes tensors, the bytes that are alive after it, and the bytes at its peak.
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
    # The leaf and both results of exp are alive, and the sum is not.
    "saved": (
        lambda: (torch.zeros(50, requires_grad=True).exp() + 1).exp(),
        150 * FLOAT,
        200 * FLOAT,
    ),
    "gradient": (gradient, 100 * FLOAT, 102 * FLOAT),  # the peak includes the sum and its gradient
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
        assert counter.live == [13 * FLOAT, 20 * FLOAT], "a task's tensor belongs to its device"
    del state, other, made


def test_counting_changes_no_variables_that_threads_share() -> None:
    with LiveBytesMode(LiveBytes(1), 0):
        assert not is_in_torch_dispatch_mode()


@pytest.mark.slow
def test_a_training_has_its_state_and_at_its_peak_its_gradients_and_what_layers_keep() -> None:
    peaks = {}
    pipeline = replace(LIVE, partitions=2, chunks=4, balance=(4, 5))
    modes: tuple[Mode, ...] = ("never", "always", "except_last")
    for row in (LIVE, *(replace(pipeline, checkpoint=mode) for mode in modes)):
        counter = LiveBytes(row.devices)
        training = make(row)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reproduce.run.peak.LiveBytes", lambda n, counter=counter: counter)
            found = measure_peak(training, CPU, steps=2)["peak_allocated"]
        peaks[row.checkpoint] = sum(found)
        gc.collect()

        state: Any = training.optimizer.state
        expected = [0] * row.devices
        expected[0] += training.input.nbytes
        expected[-1] += training.target.nbytes
        for values in state.values():
            # The step number is not made from another tensor, so it counts for the first device.
            expected[0] += values["step"].nbytes
        for j, partition in enumerate(training.partitions):
            weights = 0
            for parameter in partition.parameters():
                weights += parameter.nbytes
                expected[j] += parameter.nbytes + state[parameter]["square_avg"].nbytes
            expected[j] += sum(buffer.nbytes for buffer in partition.buffers())
            assert counter.live[j] == expected[j]
            # Parameters, gradients and optimizer state, and 2 to 40 MiB of activations per sample.
            activations = found[j] - 3 * weights
            assert 2 * 2**20 < activations < 4 * 40 * 2**20
    assert max(peaks["always"], peaks["except_last"]) < min(peaks["never"], peaks[None])
