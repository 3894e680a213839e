"""Profiles: layers' seconds are fitted by lines, from which plans are made. Only layers advance the clock."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import seconds_of
from torchgpipe.plan import plan, profiled
from torchgpipe.plan.count.count import count
from torchgpipe.plan.hardware import here
from torchgpipe.plan.hardware.here import describe_here
from torchgpipe.plan.profiled import Curve, predictor_here, profile_layers

from ..simulated import Clock, spend

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A layer that takes `fixed` seconds and `each` seconds per sample; backward takes twice as long."""

    def __init__(self, fixed: float, each: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = fixed, each

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds[0] + self.seconds[1] * len(x)
        return spend(self.linear(x), seconds, 2 * seconds)


@pytest.fixture(autouse=True)
def copies_take_some_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "seconds_of", lambda *given: 2**-20 + seconds_of(*given))
    # All threads share one clock here, so parallel work would seem to take the sum of its times.
    monkeypatch.setattr(profiled, "sharing", lambda works: 0.0)


@pytest.mark.parametrize(
    ("seconds", "at"),
    [
        ([3.0, 5.0], {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 8: 9.0}),
        ([2.0, 4.0], {1: 1.0, 8: 8.0}),  # no fixed part
        ([3.0, 3.0], {1: 3.0, 8: 3.0}),  # only a fixed part
        ([5.0, 3.0], {1: 4.0, 8: 4.0}),  # noise: more samples are never faster
        (
            [1.0, 4.0],
            {1: 0.5, 3: 2.5, 4: 4.0, 8: 8.0},
        ),  # never negative, never more than proportional
        (
            [2.0, 3.0, 7.0, 8.0],
            {1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0, 6: 5.0, 8: 7.0, 12: 7.5, 16: 8.0, 32: 10.0},
        ),
        ([2.0, 4.0, 3.0, 8.0], {1: 1.25, 4: 3.5, 8: 3.5, 16: 8.0, 32: 16.0}),
    ],
)
def test_the_curve_through_measurements(seconds: list[float], at: dict[int, float]) -> None:
    curve = Curve.through([2, 4, 8, 16][: len(seconds)], seconds)
    assert {size: curve.at(size) for size in at} == at


@pytest.mark.parametrize("device", ["cpu", "meta"])  # of layers, which may have no memory yet
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(1, (2, 4)), (3, (2, 4)), (4, (2, 4)), (6, (3, 6)), (9, (2, 4, 9)), (16, (2, 4, 8, 16))],
)
def test_layers_are_timed_for_the_sample_and_by_halves(
    samples: int, sizes: tuple[int, ...], whole: bool, device: str
) -> None:
    with torch.device(device):
        model = nn.Sequential(Layer(1, 0.5), nn.BatchNorm1d(4), Layer(0, 2))
    found = profile_layers(model, torch.rand(samples, 4), whole=whole)
    assert (found.sizes, found.whole) == (sizes, whole)
    assert [[curve.at(8) for curve in curves] for curves in found.curves] == [
        [5, 0, 16],
        [5, 0, 16],
        [10, 0, 32],
    ]
    assert all(p.device.type == device and p.grad is None for p in model.parameters())


class Wide(Layer):
    """A layer of which only one copy fits in memory."""

    alive = 0

    def __deepcopy__(self, memo: Any) -> Wide:
        Wide.alive += 1
        weakref.finalize(copied := Wide(*self.seconds), Wide.forget).atexit = False
        if Wide.alive > 1:
            raise torch.OutOfMemoryError
        return copied

    @staticmethod
    def forget() -> None:
        Wide.alive -= 1


@pytest.mark.parametrize(
    ("layer", "memory", "how"),
    [
        (Layer, "1GiB", "in whole steps"),
        (Layer, "1.5KiB", "each alone"),
        (Wide, "1GiB", "each alone"),
    ],
)
def test_a_model_that_does_not_fit_is_timed_layer_by_layer(
    layer: type[Layer], memory: str, how: str
) -> None:
    """Because a whole step is predicted not to fit, or because it runs out of memory."""
    model, sample = nn.Sequential(*(layer(0, 1) for _ in range(4))), torch.rand(8, 4)
    found = plan(
        model, sample, batch_size=8, devices=4, memory=memory, chunks=4, checkpoint="always"
    )
    assert f"{how}, in micro-batches of 2, 4 and 8" in found.source
    assert found.balance == [1, 1, 1, 1]
    # Per micro-batch of two: 2 s forward, 2 s recomputation, 4 s backward. Three recomputations are hidden.
    assert found.seconds == pytest.approx((2 + 2 + 4) * (4 + 4 - 1) - 3 * 2, rel=1e-3)


def test_a_plan_from_a_profile() -> None:
    layers = nn.Sequential(*(Layer(0, each) for each in (1, 1, 1, 1, 2, 2)))
    x = torch.rand(4, 4)
    random = torch.get_rng_state()
    found = plan(
        layers, x, batch_size=64, devices=2, memory="1GiB", chunks=[4], checkpoint=["never"]
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert found.balance == [4, 2]
    # Two equal partitions, four micro-batches of 16. Adding up gradients and the optimizer are the small rest.
    assert found.seconds == pytest.approx((4 + 1) * 16 * 4 * 3, rel=1e-3)
    assert "layers profiled on this machine's CPU" in str(found).replace("\n" + " " * 12, " ")
    assert "hardware description" not in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    assert found.gpipe(devices=["cpu", "cpu"]).balance == [4, 2]
    # `predictor_here`, which validation uses, predicts the same.
    predictor = predictor_here(layers, x, count(layers, x), devices=2, memory=2**30)
    assert predictor.step(found.candidates[0].setup).seconds == found.seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    device = torch.device("cuda:0")
    found = describe_here(device, None, None)
    assert found.devices == torch.cuda.device_count() and found.memory > 2**30
    assert 0 < found.link_bandwidth < math.inf
    profile = profile_layers(nn.Sequential(nn.Linear(4, 4)), torch.rand(4, 4, device=device))
    assert profile.device == device
