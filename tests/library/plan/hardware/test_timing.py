"""Layers timed in whole steps, or each alone, on a clock that only layers advance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import profile_times
from torchgpipe.plan.hardware import timing
from torchgpipe.plan.hardware.timing import time_alone, time_step
from torchgpipe.skip import pop, skippable, stash

from ...simulated import CLOCK, spend

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("clock")


class Layer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return spend(x * self.weight, *self.seconds)


@skippable(stash=["skip"])
class Stash(Layer):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return super().forward(x)


@skippable(pop=["skip"])
class Pop(Layer):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return super().forward(x + skip)


class Pair(Layer):
    """Hand on two tensors, of which one takes no gradient."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.ones(1)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return spend(x.mul_(2) * self.weight, *self.seconds)


class First(Layer):
    def forward(self, pair: Any) -> Tensor:
        return super().forward(pair[0])


def frozen(*seconds: float) -> Layer:
    return Layer(*seconds).requires_grad_(False)


CASES: dict[str, tuple[list[Layer], list[float], list[float]]] = {
    "plain": ([Layer(1, 2), Layer(3, 5), Layer(7, 4)], [1, 3, 7], [2, 5, 4]),
    "a skip": ([Layer(2, 1), Stash(1, 2), Layer(3, 5), Pop(7, 4)], [2, 1, 3, 7], [1, 2, 5, 4]),
    "two tensors": ([Layer(2, 1), Pair(1, 2), First(3, 5)], [2, 1, 3], [1, 2, 5]),
    "the first ones frozen": ([frozen(1, 2), frozen(2, 3), Layer(3, 5), Layer(7, 4)], [1, 2, 3, 7], [0, 0, 5, 4]),
    "one between frozen": ([Layer(1, 2), frozen(2, 3), Layer(3, 5)], [1, 2, 3], [2, 3, 5]),
    "in place": ([Layer(1, 2), InPlace(3, 5), Layer(7, 4)], [1, 3, 7], [2, 5, 4]),
    "in place at first": ([InPlace(3, 5), Layer(7, 4)], [3, 7], [5, 4]),
    "all frozen": ([frozen(1, 2), frozen(2, 3)], [1, 2], [0, 0]),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(("layers", "forward", "backward"), CASES.values(), ids=CASES)
def test_each_layer_has_its_own_seconds(
    layers: list[Layer], forward: list[float], backward: list[float], needs_grad: bool
) -> None:
    model, x = nn.Sequential(*layers), torch.ones(3, 2, requires_grad=needs_grad)
    if needs_grad:  # then the frozen ones go backward, too
        backward = [layer.seconds[1] for layer in layers]
    for found in (time_step(model, x, CPU), *time_alone(model, x, CPU, runs=2)):
        assert found == (forward, forward, backward)
    total = [a + b for a, b in zip(forward, backward, strict=True)]
    for timeout in (0.0, 60.0):
        assert profile_times(model, x, timeout, CPU) == total


class Cold(Layer):
    """Take other seconds in a copy's first run."""

    def forward(self, x: Tensor) -> Tensor:
        seconds, self.seconds = self.seconds, (1, 2)
        return spend(x * self.weight, *seconds)


def test_the_first_run_of_a_copy_does_not_count() -> None:
    model, x = nn.Sequential(Cold(100, 200)), torch.ones(3, 2)
    assert time_alone(model, x, CPU, runs=2) == [([1], [1], [2])] * 2
    assert profile_times(model, x, 1e4, CPU) == [1 + 2]


def test_no_backward_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that hands on what it was given has its gradient when the one before has, or just after."""

    def ticking() -> float:
        CLOCK.now += 1 / 1024
        return CLOCK.now

    monkeypatch.setattr(timing, "perf_counter", ticking)
    found = time_step(nn.Sequential(Layer(1, 2), nn.Identity(), Layer(3, 5)), torch.ones(3, 2), CPU)
    assert found.backward == pytest.approx([2, 0, 5], abs=0.01) and min(found.backward) >= 0
