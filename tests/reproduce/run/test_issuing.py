"""Tests of how long the host takes to issue work, with a clock that the work itself moves on."""

import pytest
import torch
from torch import Tensor, nn

from reproduce.run import issuing
from reproduce.run.issuing import host_seconds

LAUNCH, WAIT = 0.25, 64.0


class Clock:
    """A clock on which a layer takes seconds to issue, and a wait for the device takes longer."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self) -> None:
        self.now += WAIT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(issuing, "time", clock)
    return clock


class Launches(nn.Module):
    """A layer whose forward and backward take seconds to issue."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.clock.now += LAUNCH
        y = x * 2
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(self._backward)
        return y, y.detach()

    def _backward(self, gradients: tuple[Tensor, ...]) -> None:
        self.clock.now += 2 * LAUNCH


def run(layers: list[Launches]) -> None:
    x = torch.ones(2, requires_grad=True)
    for layer in layers:
        x, _ = layer(x)
    x.sum().backward()


@pytest.mark.parametrize(
    ("least", "pauses"),
    [
        (0.0, 1 + 3 + 3),  # one at first, and one before each forward and each backward of 3 layers
        (2 * LAUNCH, 1 + 1 + 2),  # after two forwards; after the last forward, and each backward
        (100.0, 1),
    ],
)
def test_pauses_do_not_count(
    least: float, pauses: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "LEAST_SECONDS", least)
    layers = [Launches(clock) for _ in range(3)]

    found = host_seconds(lambda: run(layers), layers, clock.wait)

    assert found == 3 * LAUNCH + 3 * 2 * LAUNCH
    assert clock.now == found + pauses * WAIT


def test_layers_have_no_hooks_afterwards(clock: Clock) -> None:
    layers = [Launches(clock)]
    host_seconds(lambda: run(layers), layers, clock.wait)
    before = clock.now
    run(layers)
    assert clock.now == before + 3 * LAUNCH
