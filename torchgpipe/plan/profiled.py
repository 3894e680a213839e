"""Profile a model on the present device, in place of counting operators and turning them into seconds.

The layers are timed for the sample, for half of it, a quarter, and so on. Other sizes of micro-batches follow by
straight lines between these, and on beyond them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import placed_copy, undisturbed
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import LayerCount
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.here import MOST_AT_WORK, RUNS, describe_here, device_name, sharing
from torchgpipe.plan.hardware.timing import Seconds, time_alone, time_step
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import LayerSeconds, Predictor, Setup, apart
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.trace.layer import batched

LEAST = 2
"""Samples of the smallest micro-batch that is timed: batch normalization may refuse one. Twice that are timed, too."""


@dataclass(frozen=True)
class Curve:
    """Seconds of one layer by the samples of a micro-batch, at the `sizes` at which it was timed."""

    sizes: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """Return the curve through measurements; through their mean where fewer samples took longer, which is noise."""
        level: list[list[float]] = []
        for x in seconds:
            level.append([x])
            while len(level) > 1 and fmean(level[-2]) > fmean(level[-1]):
                level[-2:] = [level[-2] + level[-1]]
        return cls(tuple(sizes), tuple(fmean(xs) for xs in level for _ in xs))

    def at(self, size: int) -> float:
        """Return the seconds for a micro-batch of `size` samples.

        Beyond the ends the line goes on, but no steeper than in proportion: neither a fixed part nor each sample takes
        less than nothing.
        """
        k = min(max(bisect(self.sizes, size), 1), len(self.sizes) - 1)
        (a, b), (x, y) = self.sizes[k - 1 : k + 1], self.seconds[k - 1 : k + 1]
        line = x + (y - x) * (size - a) / (b - a)
        if size < a:
            return max(line, x * size / a)
        return min(line, y * size / b) if size > b else line


@dataclass(frozen=True)
class Profile:
    """Seconds of every layer by the size of micro-batches, and where and how they were measured."""

    curves: tuple[list[Curve], list[Curve], list[Curve]]
    """Of forwards without a graph and with one, and of backwards."""
    device: torch.device
    sizes: tuple[int, ...]
    whole: bool
    """Whether the layers were timed in whole steps, or each alone."""
    workspace: float = 0.0
    """Bytes that libraries (cuBLAS) have kept on the device since."""

    def __str__(self) -> str:
        *sizes, last = map(str, self.sizes)
        how = "in whole steps" if self.whole else "each alone"
        return f"layers profiled on {device_name(self.device)}, {how}, in micro-batches of {', '.join(sizes)} and {last}"


class ProfiledPredictor(Predictor):
    """Predict steps from a profile; memory, and the bytes that are copied, from counts."""

    def __init__(self, counts: Counts, hardware: Hardware, profile: Profile) -> None:
        super().__init__(counts, hardware)
        self.profile = profile

    def _timed(self, size: int, layers: Sequence[LayerCount]) -> LayerSeconds:
        forward, graph, backward = (
            [curve.at(size) for curve in each] for each in self.profile.curves
        )
        flops = [
            [sum(x.flops for x in each) for each in (layer.products, layer.backward)]
            for layer in layers
        ]
        weights = apart(backward, *zip(*flops, strict=True))
        return LayerSeconds(
            forward, graph, backward, weights, self._totals([x.accumulate for x in layers]), layers
        )


def predictor_here(
    module: nn.Sequential,
    sample: TensorOrTensors,
    counts: Counts,
    *,
    devices: int | None = None,
    memory: float | None = None,
) -> ProfiledPredictor:
    """Profile on the sample's device, and predict for devices like it: what `plan` does without `hardware`.

    `memory` is each device's. The layers are timed in whole steps where one with the sample, and the layers' copies
    for it, have room in that; each alone where not. How much CPU devices slow each other down that all take steps of
    the model is measured in medium micro-batches.

    Raises:
        ValueError: as `profile_layers` and `describe_here`.
    """
    device = _device(sample)
    node = describe_here(device, devices, memory)
    (step,) = setup_memory(counts, Setup(_sizes(module, sample)[-1], (len(counts),), 1, "never"))
    copies = sum(layer.parameters + layer.frozen for layer in counts.low)
    profile = profile_layers(module, sample, whole=step.peak + copies <= node.memory)
    if node.cpu and node.devices > 1 and profile.whole:
        given, at_work = (
            _rows(module, sample, profile.sizes[len(profile.sizes) // 2]),
            min(node.devices, MOST_AT_WORK),
        )
        with undisturbed(device):
            works = [
                partial(time_step, _copy(module, device), given, device) for _ in range(at_work)
            ]
            node = replace(node, sharing=sharing(works))
    return ProfiledPredictor(counts, replace(node, workspace=profile.workspace), profile)


def _copy(module: nn.Sequential, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(placed_copy(module, index, device) for index in range(len(module))))


def profile_layers(
    module: nn.Sequential, sample: TensorOrTensors, *, whole: bool = True
) -> Profile:
    """Time the layers on the sample's device, in micro-batches as large as the sample, half as large, and so on.

    They are timed as parts of `whole` steps, on a copy of the model. Without `whole`, or without memory for that, each
    is timed alone. Layers on `meta` are timed too, with random parameters.

    Raises:
        ValueError: the sample is on `meta`, or a layer does not fit the device.
    """
    device, sizes = _device(sample), _sizes(module, sample)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with undisturbed(device):
        found = _in_steps(module, sample, sizes, device) if whole else []
        whole = bool(found)
        if not found:
            found = [
                time_alone(module, _rows(module, sample, size), device, RUNS) for size in sizes
            ]
    medians = (
        torch.tensor(found, dtype=torch.float64, device="cpu").median(dim=1).values.unbind(dim=1)
    )
    forward, graph, backward = (
        [Curve.through(sizes, times) for times in kind.T.tolist()] for kind in medians
    )
    workspace = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    return Profile((forward, graph, backward), device, sizes, whole, max(0.0, workspace))


def _in_steps(
    module: nn.Sequential, sample: TensorOrTensors, sizes: Sequence[int], device: torch.device
) -> list[list[Seconds]]:
    """Return every run for each size, after a warm-up; none if there is no memory."""
    with suppress(torch.OutOfMemoryError):
        copy, found = _copy(module, device), []
        for size in sizes:
            given = _rows(module, sample, size)
            found.append([time_step(copy, given, device) for _ in range(1 + RUNS)][1:])
        return found
    return []


def _device(sample: TensorOrTensors) -> torch.device:
    device = tensors_of(sample)[0].device
    if device.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta': give a sample on the device to profile on, "
            "or name the hardware to predict for, such as hardware='h100x8'"
        )
    return device


def _sizes(module: nn.Module, sample: TensorOrTensors) -> tuple[int, ...]:
    """Return the sizes of micro-batches that are timed, the smallest first: at least two."""
    split = batched(module) or [True]
    sizes = [
        max(2 * LEAST, next(len(x) for x, b in zip(tensors_of(sample), split, strict=False) if b))
    ]
    while sizes[0] >= 2 * LEAST:
        sizes.insert(0, sizes[0] // 2)
    return tuple(sizes)


def _rows(module: nn.Module, sample: TensorOrTensors, size: int) -> TensorOrTensors:
    """Return the first `size` rows of the sample; if it has fewer, they are repeated."""

    def take(x: Tensor, grows: bool = True) -> Tensor:
        rows = torch.arange(size, device=x.device) % len(x) if grows else ...
        return x.detach()[rows].requires_grad_(x.requires_grad)

    if isinstance(sample, Tensor):
        return take(sample)
    return tuple(map(take, sample, batched(module) or [True] * len(sample)))
