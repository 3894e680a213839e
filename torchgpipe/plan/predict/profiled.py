"""Predict steps from measured times: a model's layers are timed on a device.

Without this measurement, the seconds are predicted from the layers' operators (see `predict`).

The layers are timed for micro-batches as large as the sample, half as large, a quarter as large,
and so on. For other micro-batch sizes, the seconds are interpolated or extrapolated linearly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import Module, Sequential

from torchgpipe.balance.profile import placed_copy, undisturbed
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.footprint import LayerCount
from torchgpipe.plan.count.loss import Loss, gradients_kept
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.here import MOST_AT_WORK, RUNS, describe_here, sharing
from torchgpipe.plan.hardware.others import warn_if_disturbed
from torchgpipe.plan.hardware.timing import Seconds, time_alone, time_step
from torchgpipe.plan.predict.curves import Curve, Profile
from torchgpipe.plan.predict.memory import setup_memory
from torchgpipe.plan.predict.predict import LayerSeconds, Predictor, apart
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.microbatch import TensorOrTensors, like, tensors_of
from torchgpipe.trace.sequential import batched

LEAST = 2
"""The fewest samples of a timed micro-batch. The largest one has at least twice as many.

A single sample is not timed, because batch normalization can refuse it.
"""
TIMING_SECONDS = 10.0
"""For how many seconds whole steps are timed. After that, no further step starts.

A step that takes longer is timed once, without a warm-up, and only with the fewest samples: then a
layer's time is in proportion to the samples.
"""
A_PART = 1.0
"""How many seconds of a step are enough to measure how much devices slow each other down.

The first layers that take so long are run, and not the whole model.
"""


class ProfiledPredictor(Predictor):
    """Predict the seconds of tasks from measured times, and the rest as `Predictor` does.

    The rest is the memory, and the seconds of copies. It follows from counted bytes.

    Args:
        counts: The model's layers, with the operations and bytes counted for each layer.
        hardware: The node.
        profile: The measured seconds of the layers.
    """

    def __init__(self, counts: Counts, hardware: Hardware, profile: Profile) -> None:
        super().__init__(counts, hardware)
        self.profile = profile

    @functools.cached_property
    def _of_loss(self) -> Predictor | None:
        loss, curves = self.counts.loss, self.profile.loss
        if loss is None or curves is None:
            return None
        return ProfiledPredictor(loss, self.hardware, replace(self.profile, curves=curves))

    def _timed(self, size: int, layers: Sequence[LayerCount]) -> LayerSeconds:
        forwards, graphs, backwards = self.profile.curves
        forward = [curve.at(size) for curve in forwards]
        graph = [curve.at(size) for curve in graphs]
        backward = [curve.at(size) for curve in backwards]
        products, whole = [], []
        for layer in layers:
            products.append(sum([operator.flops for operator in layer.products]))
            whole.append(sum([operator.flops for operator in layer.backward]))
        weights = apart(backward, products, whole)
        added = self._totals([layer.accumulate for layer in layers])
        return LayerSeconds(forward, graph, backward, weights, added, layers)


def predictor_here(  # noqa: PLR0913 - those of `plan` that a profile needs
    module: Sequential,
    sample: TensorOrTensors,
    counts: Counts,
    *,
    devices: int | None = None,
    memory: float | None = None,
    loss: Loss | None = None,
) -> ProfiledPredictor:
    """Time the layers on the sample's device, and return a predictor for several such devices.

    `plan` calls this function if it is called without `hardware`. The layers are timed in training
    steps of the whole model if such a step and a copy of the model fit the memory. Otherwise each
    layer is timed alone. On a CPU, devices that work at the same time slow each other down. If the
    layers were timed in steps of the whole model, the function also measures how much slower they
    get.

    Args:
        module: The layers.
        sample: An input on the device to profile on, as large as the largest micro-batch.
        counts: The layers, with the operations and bytes counted for each layer.
        devices: How many devices there are; by default all devices that are found.
        memory: The bytes of each device; by default all of the device's memory.
        loss: The criterion and its target, if the loss is to be timed, too.

    Raises:
        ValueError: If the sample is on `meta`, a layer does not fit the device, or the system does
            not tell how much memory it has.
    """
    device = _device(sample)
    node = describe_here(device, devices, memory)
    largest = _sizes(module, sample)[-1]
    (step,) = setup_memory(counts, Setup(largest, (len(counts),), 1, "never"))
    needed = step.peak  # bytes for a step, and below for the copies of the layers that run it
    for layer in counts.low:
        needed += layer.parameters + layer.frozen
    profile = profile_layers(module, sample, whole=needed <= node.memory, loss=loss)
    if node.cpu and node.devices > 1 and profile.whole:
        medium = profile.sizes[len(profile.sizes) // 2]
        given = _rows(module, sample, medium)
        layers = _first_layers(profile, medium)
        with undisturbed(device), warn_if_disturbed("how much devices slow each other down"):
            works = []
            for _ in range(min(node.devices, MOST_AT_WORK)):
                part = _copy(module, device, layers)
                works.append(partial(time_step, part, given, device))
            node = replace(node, sharing=sharing(works))
    return ProfiledPredictor(counts, replace(node, workspace=profile.workspace), profile)


def _first_layers(profile: Profile, size: int) -> int:
    """Return how many of the model's first layers take `A_PART` seconds or more together.

    To measure how much devices slow each other down, each device runs only these layers, with
    `size` samples. If all layers together take less time, the result is the number of all layers.
    """
    seconds = 0.0
    layers = zip(*profile.curves, strict=True)
    for count, curves in enumerate(layers, 1):
        seconds += sum([curve.at(size) for curve in curves])
        if seconds >= A_PART:
            return count
    return len(profile.curves[0])


def _copy(module: Sequential, device: torch.device, layers: int | None = None) -> Sequential:
    """Copy the first `layers` layers of a model (by default, all layers) to a device."""
    copy = Sequential()
    for index in range(len(module) if layers is None else layers):
        copy.append(placed_copy(module, index, device))
    return copy


def profile_layers(
    module: Sequential, sample: TensorOrTensors, *, whole: bool = True, loss: Loss | None = None
) -> Profile:
    """Time each layer on the sample's device, with micro-batches of several sizes.

    The micro-batches are as large as the sample, half as large, and so on. Layers on `meta` are
    timed with random parameters. If a step takes long, each size is timed less often, and large
    sizes are left out.

    Args:
        module: The layers.
        sample: An input on the device to profile on.
        whole: Whether to time the layers in steps of the whole model, on a copy. If not, or if the
            memory is too small for such a step, each layer is timed alone.
        loss: The criterion and its target. If it is given, the criterion is timed like a layer.

    Raises:
        ValueError: If the sample is on `meta`, or a layer does not fit the device.
    """
    device = _device(sample)
    sizes = _sizes(module, sample)
    before = accelerator.allocated(device)
    with undisturbed(device), gradients_kept(module):
        found = _in_steps(module, sample, sizes, device, loss) if whole else []
        whole = bool(found)
        if not found:
            for size in sizes:
                layers = module if loss is None else loss.behind(module, size, device)
                found.append(time_alone(layers, _rows(module, sample, size), device, RUNS))
    sizes = sizes[: len(found)]
    medians = []
    for runs in found:
        # The dimensions of a tensor of `runs` are: run, kind of pass, layer.
        measured = torch.tensor(runs, dtype=torch.float64, device="cpu")
        medians.append(measured.median(dim=0).values)
    forward, graph, backward = [_curves(sizes, each) for each in torch.stack(medians, dim=1)]
    of_loss = None
    if loss is not None:  # The last curve of each pass is the criterion's.
        of_loss = [forward.pop()], [graph.pop()], [backward.pop()]
    workspace = accelerator.allocated(device) - before
    return Profile((forward, graph, backward), device, sizes, whole, of_loss, max(0.0, workspace))


def _curves(sizes: Sequence[int], seconds: Tensor) -> list[Curve]:
    """Return a list with a curve for each layer, through the layer's measured seconds.

    `seconds` has a row for each micro-batch size and a column for each layer.
    """
    return [Curve.through(sizes, layer) for layer in seconds.T.tolist()]


def _in_steps(
    module: Sequential,
    sample: TensorOrTensors,
    sizes: Sequence[int],
    device: torch.device,
    loss: Loss | None,
) -> list[list[Seconds]]:
    """Time training steps of the whole model, for one micro-batch size after another.

    If a criterion is given (`loss`), it is timed as one more layer. After `TIMING_SECONDS`, no
    further size is timed. Return a list for each size that was timed, with the measured seconds of
    each step. If the memory is too small for a step, return an empty list.
    """
    start = perf_counter()
    with suppress(torch.OutOfMemoryError):
        copy = _copy(module, device)
        found: list[list[Seconds]] = []
        for k, size in enumerate(sizes, 1):
            if found and perf_counter() >= start + TIMING_SECONDS:
                break
            given = _rows(module, sample, size)
            layers = copy if loss is None else loss.behind(copy, size, device)
            end = start + TIMING_SECONDS * k / len(sizes)
            warm_up = time_step(layers, given, device)
            runs: list[Seconds] = []
            while len(runs) < RUNS and perf_counter() < end:
                runs.append(time_step(layers, given, device))
            found.append(runs or [warm_up])
        return found
    return []


def _device(sample: TensorOrTensors) -> torch.device:
    device = tensors_of(sample)[0].device
    if device.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta', so no layer can be timed: give a sample on a "
            "real device, or name the hardware to predict for, such as hardware='h100x8'"
        )
    return device


def _sizes(module: Module, sample: TensorOrTensors) -> tuple[int, ...]:
    """Return the micro-batch sizes for which layers are timed: at least two, the smallest first.

    The largest is the batch size of the sample, but at least 4. Each other size is half of the next
    one, rounded down.
    """
    split = batched(module) or [True]
    first = list(split).index(True)  # the first tensor with a batch dimension
    size = max(2 * LEAST, len(tensors_of(sample)[first]))
    sizes = [size]
    while size >= 2 * LEAST:
        size //= 2
        sizes.insert(0, size)
    return tuple(sizes)


def _rows(module: Module, sample: TensorOrTensors, size: int) -> TensorOrTensors:
    """Return a micro-batch of batch size `size`, made from the example input `sample`.

    If `sample` has a smaller batch size, its entries are repeated.
    """

    def take(x: Tensor, grows: bool = True) -> Tensor:
        taken = x.detach()
        if grows:
            taken = taken[torch.arange(size, device=x.device) % len(x)]
        return taken.requires_grad_(x.requires_grad)

    if isinstance(sample, Tensor):
        return take(sample)
    return like(sample, [*map(take, sample, batched(module) or [True] * len(sample))])
