"""The seconds that layers were measured to take, as functions of the micro-batch size."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from torchgpipe.plan.hardware.here import device_name


@dataclass(frozen=True)
class Curve:
    """The seconds that one layer takes, as a function of the micro-batch size.

    The layer was timed at several sizes. Between these sizes, the function is linear.

    Attributes:
        sizes: The micro-batch sizes at which the layer was timed, the smallest first.
        seconds: The seconds for each of these sizes.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def through(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """Return the curve through the measured seconds of one layer.

        By chance, a smaller micro-batch can take longer than a larger one. The curve then goes
        through the mean of the two measurements, so that the seconds never fall as the size grows.
        """
        level: list[list[float]] = []  # groups of measurements, for their means
        for measured in seconds:
            level.append([measured])
            while len(level) > 1 and fmean(level[-2]) > fmean(level[-1]):
                group = level.pop()
                level[-1] += group
        means: list[float] = []
        for group in level:
            means += [fmean(group)] * len(group)
        return cls(tuple(sizes), tuple(means))

    def at(self, size: int) -> float:
        """Return the seconds that the layer takes for a micro-batch of `size` samples.

        Between two timed sizes, the seconds are interpolated linearly. Above or below all timed
        sizes, they are extrapolated linearly from the nearest two, but they grow at most in
        proportion to the size: a steeper line would give negative seconds for zero samples. If only
        one size was timed, the seconds are in proportion to the size.
        """
        if len(self.sizes) == 1:
            return self.seconds[0] * size / self.sizes[0]
        k = bisect(self.sizes, size)
        k = min(max(k, 1), len(self.sizes) - 1)
        a, b = self.sizes[k - 1], self.sizes[k]
        x, y = self.seconds[k - 1], self.seconds[k]
        line = x + (y - x) * (size - a) / (b - a)
        if size < a:
            return max(line, x * size / a)
        if size > b:
            return min(line, y * size / b)
        return line


Curves = tuple[list[Curve], list[Curve], list[Curve]]
"""For three passes, the curve of each layer: see `Profile.curves`."""


@dataclass(frozen=True)
class Profile:
    """The measured seconds of every layer for several micro-batch sizes, and how they were timed.

    `print` shows how the layers were timed: on which device, alone or together, with which sizes.
    """

    curves: Curves
    """Curves of forwards without an autograd graph, of forwards with a graph, and of backwards."""
    device: torch.device
    sizes: tuple[int, ...]
    whole: bool
    """Whether the layers were timed in steps of the model. Otherwise each layer was timed alone."""
    loss: Curves | None = None
    """The curves of the criterion, as the only layer; `None` if no criterion was given."""
    workspace: float = 0.0
    """Bytes that libraries, such as cuBLAS, allocated during the timing and still hold."""

    def __str__(self) -> str:
        *others, last = map(str, self.sizes)
        sizes = f"{', '.join(others)} and {last}" if others else last
        how = "in whole steps" if self.whole else "each alone"
        return f"layers profiled on {device_name(self.device)}, {how}, in micro-batches of {sizes}"
