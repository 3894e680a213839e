"""What optimizers hold, to the byte: devices' peaks where the optimizer's step is the fullest moment, and where not."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.models import unet
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.optimizer import OPTIMIZERS, Optimizer, optimizer_named
from torchgpipe.plan.predict import Setup

real_peaks = runpy.run_path(str(Path(__file__).with_name("live.py")))["real_peaks"]


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
    (wide, (4000, 8), [3, 4]),
    (frozen, (4, 8), [3, 4]),
    (small_unet, (2, 3, 16, 16), [10, 19]),
]


@functools.cache
def counted(build: Callable[[], nn.Sequential], shape: tuple[int, ...]) -> Counts:
    return count(build(), torch.empty(shape))


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


@pytest.mark.parametrize(("samples", "fullest"), [(4, True), (4000, False)])
def test_the_step_is_the_fullest_moment_where_there_are_few_activations(samples: int, fullest: bool) -> None:
    counts, adam = counted(wide, (4, 8)), optimizer_named("adam", foreach=True)
    (without,) = setup_memory(counts, Setup(samples, (7,), 2, optimizer=Optimizer(state=adam.state)))
    (device,) = setup_memory(counts, Setup(samples, (7,), 2, optimizer=adam))
    assert (device.peak > without.peak) == fullest
    if fullest:
        parameters = sum(p.nbytes for p in wide().parameters())
        assert (device.gradients, device.optimizer) == (parameters, 2 * parameters)
        assert (device.update, device.working) == (adam.made * parameters, 0)


ADAM_LOOP, FOREACH = Optimizer(2, 2, 1), Optimizer(2, 1, 0, together=True)


@pytest.mark.parametrize(
    ("optimizer", "sizes", "nbytes"),
    [
        (ADAM_LOOP, [], 0),
        (ADAM_LOOP, [8], 16),
        (ADAM_LOOP, [8, 16, 4], 8 + 32),
        (ADAM_LOOP, [16, 15], 16 + 30),  # the one before is what counts
        (FOREACH, [], 0),
        (FOREACH, [8, 16, 4], 28),
    ],
)
def test_temporaries(optimizer: Optimizer, sizes: Sequence[float], nbytes: float) -> None:
    assert optimizer.temporaries(sizes) == nbytes


def test_what_handles_all_at_once_makes_more() -> None:
    sizes = [100.0] * 10
    for name in ("rmsprop", "adagrad", "adam", "adamw"):
        one, all_of_them = (optimizer_named(name, foreach=foreach) for foreach in (False, True))
        assert one.state == all_of_them.state and not one.together and all_of_them.together
        assert all_of_them.temporaries(sizes) >= 1000 > one.temporaries(sizes)
    assert not optimizer_named("none", foreach=True).updates
