"""Profiles of layers, on a clock that only layers advance; and replays in which partitions slow each other down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import layer_profile
from benchmarks.layer_profile import Profile, profile, replayed
from torchgpipe.plan.predict import Setup
from torchgpipe.skip import pop, skippable, stash

NOW = [0.0]


class Take(torch.autograd.Function):
    """Take `forward` seconds, and `backward` seconds in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        NOW[0] += forward
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        NOW[0] += ctx.backward
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Take.apply(x * self.weight, *self.seconds)


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


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    NOW[0] = 0.0
    monkeypatch.setattr(layer_profile, "perf_counter", lambda: NOW[0])


@pytest.mark.parametrize(
    "layers", [[Layer(1, 2), Layer(3, 5), Layer(7, 4)], [Layer(2, 1), Stash(1, 2), Layer(3, 5), Pop(7, 4)]]
)
def test_each_layer_has_its_own_seconds(layers: list[Layer]) -> None:
    found = profile(nn.Sequential(*layers), torch.ones(3, 2))
    forward, backward = ([layer.seconds[k] for layer in layers] for k in (0, 1))
    assert (found.forward, found.graph, found.backward) == (forward, forward, backward)


def test_no_backward_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that hands on what it was given has its gradient when the one before has, or just after."""

    def ticking() -> float:
        NOW[0] += 1 / 1024
        return NOW[0]

    monkeypatch.setattr(layer_profile, "perf_counter", ticking)
    found = profile(nn.Sequential(Layer(1, 2), nn.Identity(), Layer(3, 5)), torch.ones(3, 2))
    assert found.backward == pytest.approx([2, 0, 5], abs=0.01) and min(found.backward) >= 0


ALONE = Profile(forward=[1.0, 1.0], graph=[1.5, 1.5], backward=[2.0, 2.0])
SHARED = Profile(forward=[2.0, 2.0], graph=[3.0, 3.0], backward=[4.0, 4.0])


@pytest.mark.parametrize(
    ("balance", "m", "checkpoint", "alone", "shared"),
    [
        ((2,), 2, "never", 2 * (3 + 4), 2 * (3 + 4)),  # one partition shares with nobody
        ((2,), 2, "always", 2 * (2 + 3 + 4), 2 * (2 + 3 + 4)),
        ((2,), 2, "except_last", 2 + 3 + 4 + 3 + 4, 2 + 3 + 4 + 3 + 4),
        ((1, 1), 1, "never", 3 + 4, 3 + 4),  # one after the other: they never work at once
        ((1, 1), 1, "always", 2 + 3 + 4, 2 + 3 + 4),  # not even a recomputation and a backward
        ((1, 1), 2, "never", 3 * 1.5 + 3 * 2, 4 * 1.5 + 4 * 2),  # at once: the second of three, at half the speed
    ],
)
def test_two_partitions_at_work_slow_each_other_down(
    balance: tuple[int, ...], m: int, checkpoint: Any, alone: float, shared: float
) -> None:
    setup = Setup(m, balance, m, checkpoint)
    assert replayed(ALONE, ALONE, setup).seconds == pytest.approx(alone)
    assert replayed(ALONE, SHARED, setup).seconds == pytest.approx(shared)
