"""Predicted bytes are the live bytes of a real run, to the byte, in a table of models and setups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reproduce.models import amoebanetd, unet
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.live import Live
from torchgpipe.plan.count.optimizer import OPTIMIZERS, Optimizer, optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup
from torchgpipe.tensors.checkpoint import MODES

from .live import counted, real_peaks

MOMENTUM = Optimizer(state=1)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 8))


def mixed() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), inner, nn.LayerNorm(64),
                         nn.GELU(), nn.Linear(64, 100))  # fmt: skip


def wide() -> nn.Sequential:
    """Parameters of many sizes, the largest after a small one, in the middle, and before a large one."""
    return nn.Sequential(nn.Linear(8, 200, bias=False), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 300, bias=False),
                         nn.Linear(300, 100, bias=False), nn.BatchNorm1d(100), nn.Linear(100, 4))  # fmt: skip


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Identity(), nn.Dropout(inplace=True), nn.ReLU(inplace=True),
                         nn.Linear(32, 32), nn.ReLU(inplace=True))  # fmt: skip


class Weighted(nn.Module):
    """A function of a parameter and the input, whose gradients depend on who holds them."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


def weighted(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Linear(8, 8), Weighted(function), nn.Linear(8, 8))


def frozen(build: Callable[[], nn.Sequential]) -> Callable[[], nn.Sequential]:
    def made() -> nn.Sequential:
        model = build()
        model[3].requires_grad_(False)
        return model

    return made


# A model, the shape of its input, and balances. With few samples the optimizer's step is the fullest moment.
CASES: list[tuple[Callable[[], nn.Sequential], tuple[int, ...], list[list[int]]]] = [
    (plain, (24, 8), [[4], [1, 1, 1, 1]]),
    (mixed, (24, 8), [[8], [3, 5], [1, 1, 6]]),
    (frozen(mixed), (24, 8), [[3, 5]]),
    (in_place, (24, 8), [[6], [1, 5], [1, 3, 2]]),
    (lambda: unet(2, 1, 4), (8, 3, 16, 16), [[29], [10, 19], [6, 10, 13]]),
    (weighted(lambda w, x: (x.sum(0).cos() + w.view(2, 4).view(8)) * x), (24, 8), [[3], [1, 1, 1]]),  # shared as a view
    (weighted(lambda w, x: (x.sin().sum(0) + w).cos() + x), (24, 8), [[3], [1, 1, 1]]),  # copied for a parameter
    (wide, (8, 8), [[7], [2, 3, 2], [2, 1, 4]]),  # of the last one, nothing to update on the second device
    (wide, (4000, 8), [[3, 4]]),
    (frozen(wide), (8, 8), [[3, 4]]),
]
ROWS = [(build, shape, balance) for build, shape, balances in CASES for balance in balances]


@pytest.mark.parametrize("zeroed", [False, True], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["sgd", "momentum", "rmsprop", "adagrad", "adam"])
@pytest.mark.parametrize(("build", "shape", "balance"), ROWS)
def test_as_counted_on_a_real_run(
    build: Any, shape: Any, balance: list[int], name: str, foreach: bool, chunks: int, checkpoint: Any, zeroed: bool
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        kind: Any = OPTIMIZERS[name]
        optimizer: torch.optim.Optimizer = kind(parameters, lr=0.1, foreach=foreach)
        return optimizer

    setup = Setup(shape[0], tuple(balance), chunks, checkpoint, optimizer_named(name, foreach=foreach), zeroed=zeroed)
    predicted = [device.peak for device in setup_memory(counted(build, shape), setup)]
    assert predicted == real_peaks(build(), torch.empty(shape), balance, chunks, checkpoint, make, zeroed=zeroed)


@pytest.mark.parametrize(("balance", "chunks", "checkpoint"), [([9], 1, "never"), ([4, 5], 2, "except_last")])
def test_pairs_of_tensors_between_layers(balance: list[int], chunks: int, checkpoint: Any) -> None:
    model, x = amoebanetd(3, 16), torch.empty(4, 3, 224, 224)
    predicted = setup_memory(count(model, x), Setup(4, tuple(balance), chunks, checkpoint, MOMENTUM))
    assert [device.peak for device in predicted] == real_peaks(model, x, balance, chunks, checkpoint)


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


@pytest.mark.parametrize(
    ("name", "state"),
    [("sgd", 2), ("momentum", 2 + 2), ("adam", 2 + 2 * 2), ("none", 0)],  # the copy is twice as large as the parameter
)
def test_master_weights_are_in_float32_and_so_is_the_state(name: str, state: float) -> None:
    held = optimizer_named(name, foreach=True, master_weights=True)
    plain = optimizer_named(name, foreach=True)
    assert held.state == state
    assert held.temporaries([100]) == (2 * (plain.temporaries([100]) + 100) if plain.updates else 0)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_steps_peak_is_within_five_percent_of_a_real_run(autocast: torch.dtype | None) -> None:
    """On a CPU, whose attention is fused."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)))
    x = torch.randn(8, 64, 64)
    (device,) = setup_memory(count(model, x, device="cpu", autocast=autocast), Setup(8, (4,), 1, "never"))
    live = Live()
    live.ignore([*model.parameters(), x])
    with live:
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            y = model(x)
        y.backward(torch.ones_like(y))
    real = live.peak() + x.nbytes + sum(p.nbytes for p in model.parameters())
    assert device.peak == pytest.approx(real, rel=0.05)
