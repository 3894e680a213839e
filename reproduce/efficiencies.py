"""Work out the efficiencies of the P40's convolutions from what others measured, with other models, on the same chip.

    shares = derived(node)             # {"conv": 0.5, "conv3x3": 0.5, "winograd": 0.5}
    checked(node, shares)              # predicted over measured, of every published figure

Source: jcjohnson/cnn-benchmarks, README (2017): forward and backward of whole models on a Pascal Titan X, cuDNN 5.1.05,
mini-batches of 16 images of 224 x 224. That is the P40's chip, GP102, with 28 of its 30 processors and other memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import torch

from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.operators import Operator

__all__ = ["MEASURED", "checked", "derived", "titan_x"]

MEASURED = {
    "vgg16": (41.59, 87.03),
    "vgg19": (48.09, 99.23),
    "resnet18": (10.14, 21.40),
    "resnet34": (17.01, 34.58),
    "resnet50": (35.03, 68.54),
    "resnet101": (53.38, 103.06),
    "resnet152": (75.45, 142.47),
}
"""Milliseconds of forward and of backward: those of its models that torchvision has in the same form."""

WINOGRAD_FROM = "vgg16"
"""Almost all of its work is 3 x 3 convolutions at stride 1."""
CONV_FROM = ("resnet50", "resnet152")
"""Most of their work is other convolutions; the mean of what the two need."""

LAUNCH = 5e-6
"""Seconds to issue an operator in Torch7, assumed: half of what the P40's description assumes of PyTorch."""


def titan_x(node: Hardware, shares: dict[str, float], launch: float = LAUNCH) -> Hardware:
    """Return a Pascal Titan X that has these compute efficiencies, and everything else as a P40 of `node`.

    NVIDIA's data sheet: 3584 cores at 1531 MHz (boost, as in the P40's peak), 480 GB/s. Assumed, without a source: the
    P40's memory efficiencies, and `launch`.
    """
    return replace(
        node,
        peak={"float32": 2 * 3584 * 1.531e9},
        memory_bandwidth=480e9,
        processors=28 if node.processors else 0,
        launch=launch,
        compute_efficiency={**node.compute_efficiency, **shares},
    )


def derived(node: Hardware, launch: float = LAUNCH) -> dict[str, float]:
    """Return the compute efficiencies with which the model takes as long as was measured.

    `conv3x3` is that of other convolutions if the node has Winograd kernels; if not, 3 x 3 convolutions have one
    efficiency for everything, which takes their place.
    """
    fast = "winograd" if "winograd" in node.compute_efficiency else "conv3x3"
    shares = {"conv": 0.5, "conv3x3": 0.5, fast: 0.5}

    def needed(model: str, kinds: tuple[str, ...]) -> float:
        def seconds(share: float) -> float:
            return sum(_milliseconds(model, titan_x(node, {**shares, **dict.fromkeys(kinds, share)}, launch)))

        return _solved(seconds, sum(MEASURED[model]))

    for _ in range(8):  # each depends on the other, a little
        shares[fast] = needed(WINOGRAD_FROM, (fast,))
        others = ("conv", "conv3x3") if fast == "winograd" else ("conv",)
        shares.update(dict.fromkeys(others, mean(needed(model, others) for model in CONV_FROM)))
    return shares


def checked(node: Hardware, shares: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return the errors of the predicted forward and backward of every model that was measured."""
    titan = titan_x(node, shares)
    return {
        model: (forward / measured[0] - 1, backward / measured[1] - 1)
        for model, measured in MEASURED.items()
        for forward, backward in [_milliseconds(model, titan)]
    }


def _milliseconds(model: str, node: Hardware) -> tuple[float, float]:
    forward, backward = _counted(model)
    return 1e3 * node.total(forward), 1e3 * node.total(backward)


@functools.cache
def _counted(model: str) -> tuple[list[Operator], list[Operator]]:
    """Count a model's forward and backward; Torch7 goes back to the images, for which nobody asks."""
    import torchvision  # which nothing else of predictions needs

    with torch.device("meta"):
        built = getattr(torchvision.models, model)()
        images = torch.empty(16, 3, 224, 224, requires_grad=True)
        with Counter() as forward:
            result = built(images)
        with Counter() as backward:
            result.backward(torch.empty_like(result))
    return forward.operators, backward.operators


def _solved(decreasing: Callable[[float], float], value: float) -> float:
    """Return where a decreasing function has that value, by bisection."""
    low, high = 0.01, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > value else (low, middle)
    return low
