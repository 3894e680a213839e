"""What optimizers hold, to the byte: devices' peaks where the optimizer's step is the fullest moment, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.models import unet
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Setup

from ..live import counted, real_peaks


def wide() -> nn.Sequential:
    """Parameters of many sizes, the largest after a small one, in the middle, and before a large one."""
    return nn.Sequential(nn.Linear(8, 200, bias=False), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 300, bias=False),
                         nn.Linear(300, 100, bias=False), nn.BatchNorm1d(100), nn.Linear(100, 4))  # fmt: skip


def frozen() -> nn.Sequential:
    model = wide()
    model[3].requires_grad_(False)
    return model


def small_unet() -> nn.Sequential:
    return unet(2, 1, 4)


CASES: list[tuple[Callable[[], nn.Sequential], tuple[int, ...], list[int]]] = [
    (wide, (4, 8), [7]),
    (wide, (4, 8), [2, 3, 2]),
    (wide, (4, 8), [2, 1, 4]),  # nothing to update on the second device
    (wide, (4000, 8), [3, 4]),
    (frozen, (4, 8), [3, 4]),
    (small_unet, (2, 3, 16, 16), [10, 19]),
]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", [name for name, make in OPTIMIZERS.items() if make is not None])
@pytest.mark.parametrize(("build", "shape", "balance"), CASES)
def test_as_counted_on_a_real_run(
    build: Callable[[], nn.Sequential], shape: tuple[int, ...], balance: list[int], name: str, foreach: bool
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        kind = OPTIMIZERS[name]
        assert kind is not None
        return kind(parameters, lr=0.1, foreach=foreach)

    setup = Setup(shape[0], tuple(balance), 2, "except_last", optimizer_named(name, foreach=foreach))
    predicted = [device.peak for device in setup_memory(counted(build, shape), setup)]
    assert predicted == real_peaks(build(), torch.empty(shape), balance, 2, "except_last", make)


@pytest.mark.parametrize(
    ("name", "state"),
    [("sgd", 2), ("momentum", 2 + 2), ("adam", 2 + 2 * 2), ("none", 0)],  # the copy is twice as large as the parameter
)
def test_master_weights_are_in_float32_and_so_is_the_state(name: str, state: float) -> None:
    held = optimizer_named(name, foreach=True, master_weights=True)
    plain = optimizer_named(name, foreach=True)
    assert held.state == state
    assert held.temporaries([100]) == (2 * (plain.temporaries([100]) + 100) if plain.updates else 0)
