"""Time a model's layers on the present device: as parts of whole steps, or each alone where a step does not fit.

In a step a layer finds in the caches what the layer before has left there, and the graph of all layers is kept:
memory that is touched for the first time takes longer than memory that was just freed. A layer that runs alone, over
and over, knows neither.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import Rehearsal, rehearse, synchronize, time_forward, time_run
from torchgpipe.skip.scope import skip_scope
from torchgpipe.tensors.microbatch import TensorOrTensors, mapped, tensors_of


class Seconds(NamedTuple):
    """Seconds of every layer for one micro-batch: forward without a graph and with one, and backward."""

    forward: list[float]
    graph: list[float]
    backward: list[float]


def time_step(module: nn.Sequential, sample: TensorOrTensors, device: torch.device) -> Seconds:
    """Run all layers forward without a graph, then forward and backward, and time each of them on the way.

    A layer's backward lasts from when its output's gradient is there until that of the layer before is. Adding up
    gradients of parameters is counted, not timed: they are freed first.
    """
    module.zero_grad()
    with torch.no_grad(), skip_scope({}):
        forward, _ = _forward(module, sample, device)
    arrived: dict[int, float] = {}

    def notice(i: int, _: Tensor) -> None:
        synchronize(device)
        arrived[i] = perf_counter()

    with skip_scope({}):
        graph, output = _forward(module, sample, device, notice)
    roots = [x for x in tensors_of(output) if x.requires_grad]
    if not roots:
        return Seconds(forward, graph, [0.0] * len(module))
    gradients = [torch.ones_like(x) for x in roots]
    synchronize(device)
    start = perf_counter()
    torch.autograd.backward(roots, gradients)
    synchronize(device)
    end = perf_counter()
    # A layer without a gradient counts as reached at the end. Layers with next to no backward may be reached out of
    # order, so the times are made to increase.
    marks = [*(arrived.get(i, end) for i in range(len(module) - 1)), start]
    marks = [*accumulate(reversed(marks), max)][::-1]
    return Seconds(forward, graph, [a - b for a, b in pairwise([end, *marks])])


def _forward(
    module: nn.Sequential,
    sample: TensorOrTensors,
    device: torch.device,
    notice: Callable[[int, Tensor], None] | None = None,
) -> tuple[list[float], TensorOrTensors]:
    """Run the layers; return their seconds and the output. `notice` is told when a layer's output has its gradient."""
    seconds: list[float] = []
    value = mapped(
        lambda x: x.clone() if x.requires_grad else x, sample
    )  # no leaf, which may not be changed in place
    for i, layer in enumerate(module):
        synchronize(device)
        start = perf_counter()
        value = layer(value)
        synchronize(device)
        seconds.append(perf_counter() - start)
        if notice is not None:
            # PyTorch crashes where a tensor gets a hook before an older view of it has noticed a change in place, which
            # it does when asked for its node.
            nodes = [(y, y.grad_fn) for y in tensors_of(value) if y.requires_grad]
            for y, _ in nodes:
                y.register_hook(partial(notice, i))
    return seconds, value


def time_alone(
    module: nn.Sequential, sample: TensorOrTensors, device: torch.device, runs: int
) -> list[Seconds]:
    """Time copies of the layers one after another, each `runs` times after a warm-up; return every run.

    Raises:
        ValueError: there is no memory for a layer.
    """

    def measure(rehearsal: Rehearsal) -> list[tuple[float, float, float]]:
        found = []
        for _ in range(1 + runs):
            rehearsal.layer.zero_grad()
            with torch.no_grad():
                forward = time_forward(rehearsal, device)
            found.append((forward, *time_run(rehearsal, device)))
        return found[1:]

    layers: list[list[tuple[float, float, float]]] = []
    try:
        layers.extend(rehearse(module, sample, device, measure))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"layer {len(layers)} cannot be profiled on {device} with {len(tensors_of(sample)[0])} samples, for which "
            "it has no memory: give a smaller sample, or name the hardware to predict for"
        ) from error
    return [Seconds(*map(list, zip(*run, strict=True))) for run in zip(*layers, strict=True)]
