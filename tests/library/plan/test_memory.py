"""Predicted bytes are the live bytes of a real run, to the byte: a table of models and setups, and generated ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reproduce.models import amoebanetd, unet
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import Optimizer, optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup
from torchgpipe.tensors.checkpoint import Mode

from .live import counted, real_peaks

MODES: tuple[Mode, ...] = ("never", "except_last", "always")
MOMENTUM = Optimizer(state=1)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 8))


def mixed() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), inner, nn.LayerNorm(64),
                         nn.GELU(), nn.Linear(64, 100))  # fmt: skip


def frozen() -> nn.Sequential:
    model = mixed()
    model[3].requires_grad_(False)
    return model


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Identity(), nn.Dropout(inplace=True), nn.ReLU(inplace=True),
                         nn.Linear(32, 32), nn.ReLU(inplace=True))  # fmt: skip


def small_unet() -> nn.Sequential:
    return unet(2, 1, 4)


def small_amoebanet() -> nn.Sequential:
    return amoebanetd(3, 16)


CASES: list[tuple[Callable[[], nn.Sequential], tuple[int, ...], list[list[int]]]] = [
    (plain, (24, 8), [[4], [2, 2], [1, 1, 1, 1]]),
    (mixed, (24, 8), [[8], [3, 5], [2, 2, 2, 2], [1, 1, 6]]),
    (frozen, (24, 8), [[8], [3, 5]]),
    (in_place, (24, 8), [[6], [2, 4], [1, 5], [1, 3, 2]]),
    (small_unet, (8, 3, 16, 16), [[29], [10, 19], [6, 10, 13]]),
]


@pytest.mark.parametrize("zeroed", [False, True], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    ("build", "shape", "balance"),
    [(build, shape, balance) for build, shape, balances in CASES for balance in balances],
)
def test_as_counted_on_a_real_run(
    build: Callable[[], nn.Sequential],
    shape: tuple[int, ...],
    balance: list[int],
    chunks: int,
    checkpoint: Any,
    zeroed: bool,
) -> None:
    setup = Setup(shape[0], tuple(balance), chunks, checkpoint, MOMENTUM, zeroed=zeroed)
    predicted = [device.peak for device in setup_memory(counted(build, shape), setup)]
    assert predicted == real_peaks(build(), torch.empty(shape), balance, chunks, checkpoint, zeroed=zeroed)


@pytest.mark.parametrize(("balance", "chunks", "checkpoint"), [([9], 1, "never"), ([4, 5], 2, "except_last")])
def test_pairs_of_tensors_between_layers(balance: list[int], chunks: int, checkpoint: Any) -> None:
    shape = (4, 3, 224, 224)
    setup = Setup(4, tuple(balance), chunks, checkpoint, MOMENTUM)
    predicted = [device.peak for device in setup_memory(counted(small_amoebanet, shape), setup)]
    assert predicted == real_peaks(small_amoebanet(), torch.empty(shape), balance, chunks, checkpoint)


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(6, 6),
    lambda: nn.Linear(6, 6, bias=False),
    nn.ReLU,
    nn.Sigmoid,
    nn.Identity,
    lambda: nn.BatchNorm1d(6),
    lambda: nn.LayerNorm(6),
    lambda: nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_any_sequence_of_layers(data: st.DataObject) -> None:
    made = data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=7))
    layers = [nn.Linear(6, 6), *(make() for make in made), nn.Linear(6, 6)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1), max_size=2)))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    chunks, checkpoint = data.draw(st.sampled_from([1, 2, 3, 6])), data.draw(st.sampled_from(MODES))
    zeroed = data.draw(st.booleans())
    model, x = nn.Sequential(*layers), torch.empty(12, 6)
    setup = Setup(12, tuple(balance), chunks, checkpoint, MOMENTUM, zeroed=zeroed)
    predicted = setup_memory(count(model, x), setup)
    assert [device.peak for device in predicted] == real_peaks(model, x, balance, chunks, checkpoint, zeroed=zeroed)


def test_an_output_that_its_layer_saves_counts_twice() -> None:
    """The user and the graph hold one storage, which is told apart only where tasks have graphs of their own."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.empty(12, 6)
    (predicted,) = setup_memory(count(model, x), Setup(12, (2,), 1, "never", MOMENTUM))
    (real,) = real_peaks(model, x, [2], 1, "never")
    assert real < predicted.peak <= real + x.nbytes


def test_the_parts_add_up() -> None:
    (device,) = setup_memory(
        counted(plain, (24, 8)), Setup(24, (4,), 4, "always", optimizer_named("adam", foreach=True))
    )
    parameters = sum(p.nbytes for p in plain().parameters())
    assert device.optimizer == 2 * parameters
    assert device.gradients in (0, parameters)
    model = (device.parameters, device.gradients, device.optimizer, device.update)
    parts = (device.stashed, device.working, device.skips, device.copies)
    assert device.peak == sum(model) + sum(parts)
