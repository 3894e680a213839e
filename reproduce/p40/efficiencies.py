"""Work out the P40's efficiencies from what others measured, with other models, on the same chip.

    node = fitted(load_hardware("p40x8"))     # the node with efficiencies with which the timings come out best
    errors(node)                              # predicted over measured - 1, of every timing

Best is where the mean square of the logarithm of predicted over measured is least, over all timings alike. An
efficiency each is found for convolutions, for Winograd kernels, and for what only reads and writes memory. That of
fused Winograd kernels is not found here (single_convolutions.py). How fast linear layers are is left to each source,
for with one model they differ by 13 ms between two of them, and the tables' models have next to none.
"""

from __future__ import annotations

import functools
import math
from collections import Counter as Tally
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from reproduce.p40.cards import Card
from reproduce.p40.timings import SOURCES, Timings
from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.operators import Operator

__all__ = ["COMPUTE", "LAUNCH", "LEAST", "MEMORY", "TOGETHER", "errors", "fitted", "least", "on_card"]

LAUNCH = 5e-6
"""Seconds to issue an operator on the cards' machines, assumed: half of what the P40's description assumes."""

COMPUTE = (("matmul", "conv", "conv3x3"), ("winograd",))
"""The classes that compute whose efficiencies the timings decide on, and which of them share one."""
MEMORY = ("norm", "pool", "elementwise")
TOGETHER = (MEMORY,)
"""The classes that are bound by memory, and how they share efficiencies: all one."""

LEAST = 0.01
"""No share is smaller."""
START = 0.5

Groups = Sequence[Collection[str]]
Halves = tuple[Mapping[Operator, int], Mapping[Operator, int]]


def fitted(
    node: Hardware,
    memory: Groups = TOGETHER,
    sources: Mapping[str, Timings] = SOURCES,
    launch: float = LAUNCH,
    compute: Groups = COMPUTE,
) -> Hardware:
    """Return the node with the efficiencies that give the timings of `sources` best.

    Each of `compute` and of `memory` is of classes that share an efficiency; what is in none keeps that of the node.
    """
    chosen = list(sources.values())
    shares = len(compute) + len(memory)
    # A convolution may be above 1, where an efficiency for all that are 3 x 3 stands for Winograd kernels, too.
    most = [2.0] * len(compute) + [1.0] * (len(memory) + len(chosen))

    def with_shares(x: Sequence[float]) -> Hardware:
        return _with(node, _by_class(compute, x[: len(compute)]), _by_class(memory, x[len(compute) : shares]))

    def residuals(x: Sequence[float]) -> list[float]:
        found = with_shares(x)
        each = (_logarithms(found, timings, x[shares + i], launch) for i, timings in enumerate(chosen))
        return [value for values in each for value in values.values()]

    return with_shares(least(residuals, most))


def errors(node: Hardware, launch: float = LAUNCH) -> dict[tuple[str, str, int], float]:
    """Return predicted over measured - 1 by source, model, and number of the figure, with the best linear layers."""
    found = {}
    for name, timings in SOURCES.items():

        def residuals(x: Sequence[float], timings: Timings = timings) -> list[float]:
            return list(_logarithms(node, timings, x[0], launch).values())

        (linear,) = least(residuals, [1.0])
        for (model, k), value in _logarithms(node, timings, linear, launch).items():
            found[name, model, k] = math.expm1(value)
    return found


def on_card(node: Hardware, card: Card, linear: float, launch: float = LAUNCH) -> Hardware:
    """Return the card with the node's efficiencies, but for linear layers.

    Assumed, without a source: its memory gives the same share of its bandwidth as the P40's, and `launch`.
    """
    return replace(
        node,
        peak={"float32": card.peak},
        memory_bandwidth=card.bandwidth,
        processors=card.processors if node.processors else 0,
        launch=launch,
        memory_efficiency={**node.memory_efficiency, "matmul": linear},
    )


def _by_class(groups: Groups, shares: Sequence[float]) -> dict[str, float]:
    return {kind: share for kinds, share in zip(groups, shares, strict=True) for kind in kinds}


def _with(node: Hardware, compute: Mapping[str, float], memory: Mapping[str, float]) -> Hardware:
    return replace(
        node,
        compute_efficiency={**node.compute_efficiency, **compute},
        memory_efficiency={**node.memory_efficiency, **memory},
    )


def least(residuals: Callable[[Sequence[float]], list[float]], most: Sequence[float]) -> list[float]:
    """Return the shares, each up to its most, at which the sum of squares is least."""
    from scipy.optimize import least_squares  # which nothing else of predictions needs

    bounds = ([LEAST] * len(most), most)
    found = least_squares(residuals, [START] * len(most), bounds=bounds, diff_step=1e-3)
    return [float(x) for x in found.x]


def _logarithms(node: Hardware, timings: Timings, linear: float, launch: float) -> dict[tuple[str, int], float]:
    """Return the logarithms of predicted over measured, by model and number of the figure."""
    card = on_card(node, timings.card, linear, launch)
    found = {}
    for model, measured in timings.steps.items():
        halves = [1e3 * sum(times * card.seconds(x) for x, times in half.items()) for half in _counted(model, timings)]
        predicted = halves if len(measured) == 2 else [sum(halves)]
        for k, (a, b) in enumerate(zip(predicted, measured, strict=True)):
            found[model, k] = math.log(a / b)
    return found


def _counted(model: str, timings: Timings) -> Halves:
    return _count(model, timings.batch, timings.to_images, timings.adds)


@functools.cache
def _count(model: str, batch: int, to_images: bool, adds: bool) -> Halves:
    """Count how often each operator runs in a model's forward, and in its backward."""
    import torchvision  # which nothing else of predictions needs

    with torch.device("meta"):
        built = getattr(torchvision.models, model)()
        images = torch.empty(batch, 3, 224, 224, requires_grad=to_images)
        with Counter() as forward:
            result = built(images)
        with Counter() as backward:
            result.backward(torch.empty_like(result))
        if adds:  # writes them, then reads both and writes the sum
            backward.operators += [Operator("elementwise", "float32", 0.0, 4.0 * p.nbytes) for p in built.parameters()]
    return Tally(forward.operators), Tally(backward.operators)
