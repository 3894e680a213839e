"""Fit the P40's efficiencies to what others measured, with other models, on cards with the same chip.

    node = fitted(load_hardware("p40x8"))     # the node with the efficiencies that give the timings best
    errors(node)                              # predicted over measured - 1, of every timing

Best is the least mean square of the logarithm of predicted over measured, over all timings alike. How fast linear
layers are is one parameter more for each source: with one model they differ by 13 ms between two of them, and the
tables' models have next to none.
"""

from __future__ import annotations

import functools
import math
from collections import Counter as Tally
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torchvision

from research.p40.cards import Card
from research.p40.timings import SOURCES, Timings
from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.operators import Operator
from torchgpipe.plan.remembered import Remembered

__all__ = ["COMPUTE", "LAUNCH", "MEMORY", "errors", "fitted", "linear_shares", "on_card"]

LAUNCH = 5e-6
"""Seconds to issue an operator on the cards' machines, assumed: half of what the P40's description assumes."""
COMPUTE = (("matmul", "conv", "conv3x3", "winograd"),)
"""The classes that compute, by which of them share an efficiency: all."""
MEMORY = ("norm", "pool", "elementwise")
"""The classes that only touch memory, which share one."""
LEAST, START = 0.01, 0.5
"""No efficiency is smaller, and where the search begins."""

REMEMBERED = Remembered()
"""Models are alike, and what is counted once need not be worked out again."""

Groups = Sequence[Collection[str]]
Halves = tuple[Mapping[Operator, int], Mapping[Operator, int]]


def fitted(node: Hardware, sources: Mapping[str, Timings] = SOURCES, compute: Groups = COMPUTE) -> Hardware:
    """Return the node with the efficiencies that give the timings of `sources` best, one for each of `compute`."""
    groups = (*compute, MEMORY)
    chosen = list(sources.values())

    def with_shares(x: Sequence[float]) -> Hardware:
        share = {kind: x[i] for i, kinds in enumerate(groups) for kind in kinds}
        computing, touching = node.compute_efficiency, node.memory_efficiency
        return replace(
            node,
            compute_efficiency={k: share.get(k, v) for k, v in computing.items()},
            memory_efficiency={k: share[k] if k in MEMORY else v for k, v in touching.items()},
        )

    def residuals(x: Sequence[float]) -> list[float]:
        found = with_shares(x)
        each = (_logarithms(found, timings, x[len(groups) + i]) for i, timings in enumerate(chosen))
        return [value for values in each for value in values.values()]

    # A convolution may be above 1, where an efficiency for all that are 3 x 3 stands for Winograd kernels, too.
    return with_shares(_least(residuals, [2.0] * len(compute) + [1.0] * (1 + len(chosen))))


def linear_shares(node: Hardware, sources: Mapping[str, Timings] = SOURCES) -> dict[str, float]:
    """Return the share of memory's bandwidth that linear layers reach in each source, the one that fits it best."""
    return {
        name: _least(lambda x, timings=timings: list(_logarithms(node, timings, x[0]).values()), [1.0])[0]  # type: ignore[misc]
        for name, timings in sources.items()
    }


def errors(node: Hardware, sources: Mapping[str, Timings] = SOURCES) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured - 1 by source and model, of each of its figures, with the best linear layers."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, linear in linear_shares(node, sources).items():
        for (model, _), value in _logarithms(node, sources[name], linear).items():
            found.setdefault((name, model), []).append(math.expm1(value))
    return found


def on_card(node: Hardware, card: Card, linear: float) -> Hardware:
    """Return the card with the node's efficiencies, but for linear layers.

    Assumed, without a source: its memory gives the same share of its bandwidth as the P40's, and `LAUNCH`.
    """
    return replace(
        node,
        peak={"float32": card.peak},
        memory_bandwidth=card.bandwidth,
        processors=card.processors if node.processors else 0,
        launch=LAUNCH,
        memory_efficiency={**node.memory_efficiency, "matmul": linear},
    )


def _least(residuals: Callable[[Sequence[float]], list[float]], most: Sequence[float]) -> list[float]:
    """Return the shares, each up to its most, at which the sum of squares is least."""
    from scipy.optimize import least_squares

    bounds = ([LEAST] * len(most), most)
    found = least_squares(residuals, [START] * len(most), bounds=bounds, diff_step=1e-3)
    return [float(x) for x in found.x]


def _logarithms(node: Hardware, timings: Timings, linear: float) -> dict[tuple[str, int], float]:
    """Return the logarithms of predicted over measured, by model and number of the figure."""
    card = on_card(node, timings.card, linear)
    found = {}
    for model, measured in timings.steps.items():
        counted = _counted(model, timings.batch, timings.to_images, timings.adds)
        halves = [1e3 * sum(times * card.seconds(x) for x, times in half.items()) for half in counted]
        predicted = halves if len(measured) == 2 else [sum(halves)]
        for k, (a, b) in enumerate(zip(predicted, measured, strict=True)):
            found[model, k] = math.log(a / b)
    return found


@functools.cache
def _counted(model: str, batch: int, to_images: bool, adds: bool) -> Halves:
    """Count how often each operator runs in a model's forward, and in its backward."""
    with torch.device("meta"), REMEMBERED:
        built = getattr(torchvision.models, model)()
        images = torch.empty(batch, 3, 224, 224, requires_grad=to_images)
        with Counter() as forward:
            result = built(images)
        gradient = torch.empty_like(result)
        with Counter() as backward:
            result.backward(gradient)
        if adds:  # writes them, then reads both and writes the sum
            backward.operators += [Operator("elementwise", "float32", 0.0, 4.0 * p.nbytes) for p in built.parameters()]
    return Tally(forward.operators), Tally(backward.operators)
