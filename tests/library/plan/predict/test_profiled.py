"""Test plans that are made from profiles, which measure the seconds of each layer.

A curve through the measurements gives the seconds of a layer for any number of samples. A simulated
clock replaces the real one, and advances only when layers run.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential

from torchgpipe.balance.profile import seconds_of
from torchgpipe.plan import plan
from torchgpipe.plan.count.count import count
from torchgpipe.plan.hardware import here, others
from torchgpipe.plan.hardware.here import describe_here
from torchgpipe.plan.hardware.timing import time_step
from torchgpipe.plan.predict import profiled
from torchgpipe.plan.predict.curves import Curve
from torchgpipe.plan.predict.profiled import predictor_here, profile_layers

from ...simulated import Clock, spend

CPU = torch.device("cpu")


class Layer(Module):
    """A layer whose forward takes `fixed + each * samples` seconds.

    Its backward takes twice as long as its forward.
    """

    def __init__(self, fixed: float, each: float) -> None:
        super().__init__()
        self.linear = Linear(4, 4)
        self.fixed = fixed
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.fixed + self.each * len(x)
        return spend(self.linear(x), seconds, 2 * seconds)


@pytest.fixture(autouse=True)
def copies_take_some_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "seconds_of", lambda *given: 2**-20 + seconds_of(*given))
    # All threads advance the same simulated clock. Layers that run in parallel would therefore seem
    # to slow each other down. This fixture makes the profile find that they do not.
    monkeypatch.setattr(profiled, "sharing", lambda works: 0.0)


# Each row has the measured seconds for 2, 4, 8, … samples, and what the fitted curve must give: a
# dictionary from numbers of samples to seconds.
@pytest.mark.parametrize(
    ("seconds", "at"),
    [
        ([3.0, 5.0], {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 8: 9.0}),
        # The time is proportional to the number of samples.
        ([2.0, 4.0], {1: 1.0, 8: 8.0}),
        # The time does not depend on the number of samples.
        ([3.0, 3.0], {1: 3.0, 8: 3.0}),
        # More samples cannot take less time, so the difference is noise.
        ([5.0, 3.0], {1: 4.0, 8: 4.0}),
        # Outside of the measured numbers of samples, the curve must not become negative, and must
        # not rise faster than in proportion to the number of samples.
        ([1.0, 4.0], {1: 0.5, 3: 2.5, 4: 4.0, 8: 8.0}),
        (
            [2.0, 3.0, 7.0, 8.0],
            {1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0, 6: 5.0, 8: 7.0, 12: 7.5, 16: 8.0, 32: 10.0},
        ),
        ([2.0, 4.0, 3.0, 8.0], {1: 1.25, 4: 3.5, 8: 3.5, 16: 8.0, 32: 16.0}),
    ],
)
def test_the_curve_through_measurements(seconds: list[float], at: dict[int, float]) -> None:
    sizes = [2, 4, 8, 16]
    curve = Curve.through(sizes[: len(seconds)], seconds)
    for size, expected in at.items():
        assert curve.at(size) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])  # a layer may be on meta, without memory
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(1, (2, 4)), (3, (2, 4)), (4, (2, 4)), (6, (3, 6)), (9, (2, 4, 9)), (16, (2, 4, 8, 16))],
)
def test_layers_are_timed_for_the_sample_and_by_halves(
    samples: int, sizes: tuple[int, ...], whole: bool, device: str
) -> None:
    with torch.device(device):
        model = Sequential(Layer(1, 0.5), BatchNorm1d(4), Layer(0, 2))

    found = profile_layers(model, torch.rand(samples, 4), whole=whole)

    assert found.sizes == sizes
    assert found.whole == whole
    # The seconds of forwards, of recomputations, and of backwards, for 8 samples.
    expected = [[5, 0, 16], [5, 0, 16], [10, 0, 32]]
    for curves, seconds in zip(found.curves, expected, strict=True):
        assert [curve.at(8) for curve in curves] == seconds
    for parameter in model.parameters():
        assert parameter.device.type == device
        assert parameter.grad is None


@pytest.mark.parametrize(
    ("seconds", "sizes", "steps"),
    [
        # The first step takes more than a third of the patience, and the second one the rest.
        (1.0, (2, 4), [2, 4]),
        # The first step takes longer than there is patience.
        (3.0, (2,), [2]),
        # All runs are done: a warm-up, and five more.
        (0.01, (2, 4, 8), [2] * 6 + [4] * 6 + [8] * 6),
    ],
)
def test_long_steps_are_timed_seldom(
    seconds: float,
    sizes: tuple[int, ...],
    steps: list[int],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a profile times a slow layer in fewer steps than a fast one.

    The layer takes `seconds` for the forward of one sample. A timed step has two forwards and a
    backward, which takes as long as two forwards: `4 * seconds` for each sample.
    """
    monkeypatch.setattr(profiled, "perf_counter", lambda: clock.now)
    timed = []

    def noted(module: Sequential, sample: Tensor, device: torch.device) -> Any:
        timed.append(len(sample))
        return time_step(module, sample, device)

    monkeypatch.setattr(profiled, "time_step", noted)

    found = profile_layers(Sequential(Layer(0, seconds)), torch.rand(8, 4))

    assert timed == steps
    assert found.sizes == sizes
    assert [curve.at(16) for (curve,) in found.curves] == pytest.approx(
        [16 * seconds, 16 * seconds, 32 * seconds]
    )
    assert str(found).endswith(f"in micro-batches of {' and '.join(map(str, sizes[-2:]))}") == (
        len(sizes) < 3
    )


def test_devices_slow_each_other_down_with_the_first_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check which layers are run to measure how much devices slow each other down.

    All devices run the first layers of the model at the same time. They run as many layers as take
    `A_PART` seconds together: in this model, two layers.
    """
    copied: list[int] = []

    def sharing(works: Any) -> float:
        copied.extend(len(work.args[0]) for work in works)
        return 0.25

    monkeypatch.setattr(profiled, "sharing", sharing)
    model = Sequential(*[Layer(0.2, 0) for _ in range(5)])
    predictor = predictor_here(model, torch.rand(4, 4), count(model, torch.rand(4, 4)), devices=3)
    assert copied == [2, 2, 2]
    assert predictor.hardware.sharing == 0.25


def test_a_plan_warns_if_other_programs_used_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 30.0])
    monkeypatch.setattr(others, "_busy_of_others", lambda: next(seconds))
    monkeypatch.setattr(others, "perf_counter", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    model = Sequential(*[Layer(0, 1) for _ in range(4)])
    arguments: dict[str, Any] = {"batch_size": 8, "devices": 4, "chunks": 4, "memory": "1GiB"}
    warning = "other programs used 75% of the cores while how much devices slow .* plan again"
    with pytest.warns(UserWarning, match=warning):
        plan(model, torch.rand(8, 4), **arguments)


class Wide(Layer):
    """A layer that runs out of memory as soon as two of its copies exist at once."""

    alive = 0

    def __deepcopy__(self, memo: Any) -> Wide:
        Wide.alive += 1
        copied = Wide(self.fixed, self.each)
        finalizer = weakref.finalize(copied, Wide.forget)
        finalizer.atexit = False
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
    """Check that each layer is timed alone if a step of the whole model does not fit in memory.

    Either the step is predicted not to fit, or it runs out of memory when it is tried.
    """
    layers = [layer(0, 1) for _ in range(4)]
    model = Sequential(*layers)
    arguments: dict[str, Any] = {"batch_size": 8, "devices": 4, "chunks": 4}

    found = plan(model, torch.rand(8, 4), memory=memory, checkpoint="always", **arguments)

    assert f"{how}, in micro-batches of 2, 4 and 8" in found.source
    assert found.balance == [1, 1, 1, 1]
    # These are the seconds for a micro-batch of two samples on one device. Three of the
    # recomputations add no time, because they run while their device waits for a gradient.
    forward, recomputation, backward = 2, 2, 4
    cycle = forward + recomputation + backward
    expected = cycle * (4 + 4 - 1) - 3 * recomputation
    assert found.seconds == pytest.approx(expected, rel=1e-3)


def test_a_plan_from_a_profile() -> None:
    layers = [Layer(0, each) for each in (1, 1, 1, 1, 2, 2)]
    model = Sequential(*layers)
    x = torch.rand(4, 4)
    random = torch.get_rng_state()
    arguments: dict[str, Any] = {"batch_size": 64, "chunks": [4], "checkpoint": ["never"]}

    found = plan(model, x, devices=2, memory="1GiB", **arguments)

    assert torch.equal(torch.get_rng_state(), random)
    assert found.balance == [4, 2]
    # Both partitions take the same time for each of the four micro-batches of 16 samples. The
    # tolerance covers the time for adding up gradients and for updating parameters.
    assert found.seconds == pytest.approx((4 + 1) * 16 * 4 * 3, rel=1e-3)
    text = str(found)
    one_line = text.replace("\n" + " " * 12, " ")
    assert "layers profiled on this machine's CPU" in one_line
    assert "hardware description" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert found.gpipe(devices=["cpu", "cpu"]).balance == [4, 2]
    # `predictor_here` predicts the same seconds as the plan.
    predictor = predictor_here(model, x, count(model, x), devices=2, memory=2**30)
    setup = found.candidates[0].setup
    assert predictor.step(setup).seconds == found.seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    device = torch.device("cuda:0")
    found = describe_here(device, None, None)
    assert found.devices == torch.cuda.device_count()
    assert found.memory > 2**30
    assert 0 < found.link_bandwidth < math.inf
    model = Sequential(Linear(4, 4))
    profile = profile_layers(model, torch.rand(4, 4, device=device))
    assert profile.device == device
