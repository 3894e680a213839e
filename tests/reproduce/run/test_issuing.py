"""Tests of how to measure the time that the host takes to issue (submit) work to a GPU.

The clock and the waits for the GPU are simulated.
"""

import pytest
import torch
from torch import Tensor, nn

from reproduce.machine import issuing
from reproduce.machine.devices import Devices
from reproduce.machine.issuing import host_seconds

from .test_emulation import emulation, pipeline

LAUNCH, WAIT = 0.25, 64.0


class Clock:
    """A simulated clock. Layers advance it, and each wait for the device takes `WAIT` seconds."""

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
    """A layer that advances the simulated clock in forward, and twice as much in backward."""

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
        # The numbers of pauses: at the start, before forwards of 3 layers, and before backwards.
        (0.0, 1 + 3 + 3),
        (2 * LAUNCH, 1 + 1 + 2),
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


def test_pauses_within_a_task_are_not_seconds_of_issuing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that pauses within a task do not count as time to issue (submit) the task.

    In such a pause, the host waits until the device is idle. In this test, a simulated clock
    advances by a second when it is read, and by a minute in a pause.
    """
    now = 0.0

    def wait(devices: Devices) -> None:
        nonlocal now
        now += 60.0

    def read() -> float:
        nonlocal now
        now += 1.0
        return now

    emulated = emulation(pipeline(3, checkpoint="always"))
    monkeypatch.setattr(Devices, "synchronize", wait)
    monkeypatch.setattr("time.perf_counter", read)
    seconds = emulated._issue_seconds()
    # A pause within a task has three readings: whether it is due, its beginning and its end.
    layers = len(list(emulated.training.partitions[0].children()))
    forward, *_ = seconds.values()
    assert forward == 1 + 2 * layers
