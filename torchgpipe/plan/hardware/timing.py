"""Time the layers of a model on a device, in steps of the whole model or each layer alone.

A step of the whole model gives more realistic times, for two reasons. First, a layer's input can
still be in the device's caches, because the previous layer has just computed it. Second, the
autograd graph of all layers stays in memory, so a layer gets new memory, which is slower than
memory that was just freed. Each layer is timed alone only if a step of the whole model does not fit
the memory.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Sequential

from torchgpipe.balance.profile import Rehearsal, rehearse, synchronize, time_forward, time_run
from torchgpipe.skip.scope import skip_scope
from torchgpipe.tensors.microbatch import TensorOrTensors, in_form, mapped, tensors_of
from torchgpipe.trace.parts import as_tensors


class Seconds(NamedTuple):
    """The measured seconds of all layers for one micro-batch, with a list for each kind of pass."""

    forward: list[float]
    """The seconds of each layer's forward without an autograd graph."""
    graph: list[float]
    """The seconds of each layer's forward with an autograd graph."""
    backward: list[float]


def time_step(module: Sequential, sample: TensorOrTensors, device: torch.device) -> Seconds:
    """Run a training step of the whole model on one device, and time each layer in it.

    The step has three passes: a forward without an autograd graph, a forward with a graph, and a
    backward. The backward of a layer lasts from the arrival of its output's gradient to the arrival
    of its input's gradient. The gradients of parameters are freed before the step. So the times do
    not include the addition to earlier gradients, whose time is predicted separately.

    Args:
        module: The layers.
        sample: The input of the first layer.
        device: The device of the layers and the sample.
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
    # The times at which the backward reaches the layers, from the last layer to the first. For a
    # layer whose output gets no gradient, the time at which the backward ends is taken. The hooks
    # of very fast layers can run out of order, so `accumulate` with `max` keeps the times from
    # decreasing.
    arrivals = [arrived.get(i, end) for i in reversed(range(len(module) - 1))]
    times = [*accumulate([start, *arrivals], max), end]
    backward = [later - earlier for earlier, later in pairwise(times)]
    backward.reverse()
    return Seconds(forward, graph, backward)


def _forward(
    module: Sequential,
    sample: TensorOrTensors,
    device: torch.device,
    notice: Callable[[int, Tensor], None] | None = None,
) -> tuple[list[float], TensorOrTensors]:
    """Run the layers' forward; return the seconds of each layer, and the last layer's output.

    If `notice` is given, it is called in the backward, each time the gradient of a layer's output
    arrives. Its arguments are the layer's number and the gradient.
    """
    seconds: list[float] = []
    # A clone is no leaf of the graph, so layers may change it in place.
    value = mapped(lambda x: x.clone() if x.requires_grad else x, sample)
    for i, layer in enumerate(module):
        synchronize(device)
        start = perf_counter()
        value = as_tensors(layer(in_form(value)))
        synchronize(device)
        seconds.append(perf_counter() - start)
        if notice is not None:
            # Read each `grad_fn` before a hook is registered, because otherwise PyTorch can crash:
            # if a view's base was changed in place, the view gets its new graph node only when its
            # `grad_fn` is read. The view must not get a hook before that.
            nodes = [(x, x.grad_fn) for x in tensors_of(value) if x.requires_grad]
            for x, _ in nodes:
                x.register_hook(partial(notice, i))
    return seconds, value


def time_alone(
    module: Sequential, sample: TensorOrTensors, device: torch.device, runs: int
) -> list[Seconds]:
    """Time each layer alone, on a copy, so that only one layer is on the device at a time.

    Args:
        module: The layers.
        sample: The input of the first layer.
        device: The device to run the copies on.
        runs: How often each layer is timed, after a warm-up.

    Returns:
        A list with an item for each run: the seconds of all layers.

    Raises:
        ValueError: If the device has too little memory for a layer.
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
        samples = len(tensors_of(sample)[0])
        raise ValueError(
            f"layer {len(layers)} with {samples} samples does not fit the memory of {device}, so "
            "its time cannot be measured: give a smaller sample, or name the hardware to predict "
            "for, such as hardware='h100x8'"
        ) from error
    found = []
    for run in zip(*layers, strict=True):
        forward, graph, backward = map(list, zip(*run, strict=True))
        found.append(Seconds(forward, graph, backward))
    return found
