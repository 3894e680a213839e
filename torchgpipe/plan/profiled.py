"""Profile a model on the present device, in place of counting operators and turning them into seconds.

Each layer is timed alone, forward and backward apart, for micro-batches of two sizes; any other size follows by the
straight line through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import Rehearsal, rehearse, time_run, undisturbed
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.plan.count import Counts
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.here import RUNS, device_name
from torchgpipe.plan.predict import LayerSeconds, Predictor

__all__ = ["Line", "Profile", "ProfiledPredictor", "profile_layers"]

LEAST = 4
"""Samples of the larger micro-batch at least; the smaller one has half of them, and one may be refused."""


@dataclass(frozen=True)
class Line:
    """Seconds of one layer: `fixed`, and `each` for every sample of the micro-batch."""

    fixed: float
    each: float

    @classmethod
    def through(cls, sizes: tuple[int, int], seconds: tuple[float, float]) -> Line:
        """Return the line through two measurements; noise makes neither part negative."""
        (a, b), (x, y) = sizes, seconds
        each = (y - x) / (b - a)
        if each < 0:
            return cls((x + y) / 2, 0.0)
        fixed = x - each * a
        return cls(fixed, each) if fixed >= 0 else cls(0.0, y / b)

    def at(self, size: int) -> float:
        """Return the seconds for a micro-batch of `size` samples."""
        return self.fixed + self.each * size


@dataclass(frozen=True)
class Profile:
    """Seconds of every layer's forward and backward, and where and with what micro-batches they were measured."""

    forward: list[Line]
    backward: list[Line]
    device: torch.device
    sizes: tuple[int, int]
    workspace: float = 0.0
    """Bytes that libraries (cuBLAS) have kept on the device since."""

    def __str__(self) -> str:
        return f"layers profiled on {device_name(self.device)}, in micro-batches of {self.sizes[0]} and {self.sizes[1]}"


class ProfiledPredictor(Predictor):
    """Predict steps from a profile; memory, and the bytes that are copied, from counts."""

    def __init__(self, counts: Counts, hardware: Hardware, profile: Profile) -> None:
        super().__init__(counts, hardware)
        self.profile = profile

    def layers(self, size: int) -> LayerSeconds:
        """Return the seconds of every layer for micro-batches of `size` samples."""
        if size not in self._known:
            layers = self.counts.at(size)
            self._known[size] = LayerSeconds(
                forward=[line.at(size) for line in self.profile.forward],
                backward=[line.at(size) for line in self.profile.backward],
                accumulate=[self.hardware.total(layer.accumulate) for layer in layers],
                layers=layers,
            )
        return self._known[size]


def profile_layers(module: nn.Sequential, sample: TensorOrTensors) -> Profile:
    """Time the layers on the sample's device, in micro-batches as large as the sample and half as large.

    Layers on `meta` are timed too, with random parameters: one at a time has to fit the device.

    Raises:
        ValueError: the sample is on `meta`, or a layer does not fit the device.
    """
    tensors = (sample,) if isinstance(sample, Tensor) else sample
    device = tensors[0].device
    if device.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta': give a sample on the device to profile on, "
            "or name the hardware to predict for, such as hardware='h100x8'"
        )
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    high = max(LEAST, len(tensors[0]))
    sizes = (high // 2, high)
    found = []
    with undisturbed(device):
        for size in sizes:
            times: list[tuple[float, float]] = []
            try:
                for pair in rehearse(module, _resized(sample, size), device, partial(_measure, device)):
                    times.append(pair)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"layer {len(times)} cannot be profiled on {device} with {size} samples, for which it has no "
                    "memory: give a smaller sample, or name the hardware to predict for"
                ) from error
            found.append(times)
    forward, backward = ([Line.through(sizes, (low[k], up[k])) for low, up in zip(*found, strict=True)] for k in (0, 1))
    workspace = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    return Profile(forward, backward, device, sizes, max(0.0, workspace))


def _measure(device: torch.device, rehearsal: Rehearsal) -> tuple[float, float]:
    """Return the median seconds of a layer's forward and backward; adding up gradients is counted, not timed."""
    runs = []
    for _ in range(1 + RUNS):
        for parameter in rehearsal.layer.parameters():
            parameter.grad = None
        runs.append(time_run(rehearsal, device))
    forward, backward = zip(*runs[1:], strict=True)
    return median(forward), median(backward)


def _resized(sample: TensorOrTensors, size: int) -> TensorOrTensors:
    """Return the sample with `size` rows: its first, over again where it has fewer."""

    def resize(x: Tensor) -> Tensor:
        rows = torch.arange(size, device=x.device) % len(x)
        return x.detach()[rows].requires_grad_(x.requires_grad)

    return resize(sample) if isinstance(sample, Tensor) else tuple(resize(x) for x in sample)
