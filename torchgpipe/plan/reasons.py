"""Write sentences that say why a planned pipeline is not faster.

A sentence names the slowest layer, the bubble, too little memory, or a training without a pipeline
that is faster.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import add
from typing import NamedTuple

from torchgpipe.plan.count.loss import CRITERION
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.search.alternatives import Alternative
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate, assess

MUCH = 0.1
"""The text mentions memory if its limit makes the best setup slower by more than this share."""
CLEARLY = 1.005
"""Training without a pipeline is mentioned if it is faster by more than this factor."""
TAKE = {"data parallel": "DistributedDataParallel", "FSDP": "fully_shard"}
"""What to use in place of a pipeline, for each way to train without one."""


class Bottleneck(NamedTuple):
    """The slowest layer of the device that works longest, or the criterion if it takes longer.

    Attributes:
        device: The number of the device.
        layer: The number of the layer; `None` for the criterion.
        name: The name of the layer.
        share: The share of the device's working time that this layer takes, from 0 to 1.
    """

    device: int
    layer: int | None
    name: str
    share: float


def find_bottleneck(predictor: Predictor, best: Candidate) -> Bottleneck:
    """Return the slowest layer of the device that works longest."""
    setup = best.setup
    timed = predictor.layers(setup.sizes[0])
    seconds = list(map(add, timed.graph, timed.backward))
    layers: list[list[int]] = [[] for _ in best.devices]
    for device, (start, stop) in zip(setup.full_schedule.placement, setup.cuts, strict=True):
        layers[device] += range(start, stop)
    work = [0.0] * len(layers)
    for device, own in enumerate(layers):
        for layer in own:
            work[device] += seconds[layer]
    last = setup.full_schedule.placement[-1]
    loss = sum(predictor.loss(setup.sizes[0]))
    work[last] += loss
    device = work.index(max(work))
    slowest = max(layers[device], key=seconds.__getitem__)
    whole = work[device] or 1.0
    if device == last and loss > seconds[slowest]:
        return Bottleneck(device, None, CRITERION, loss / whole)
    return Bottleneck(device, slowest, predictor.counts.low[slowest].name, seconds[slowest] / whole)


def about_bottleneck(found: Bottleneck, devices: int) -> str:
    """Name the slowest layer, or the criterion."""
    if found.layer is None:
        longest = "" if devices == 1 else f"Device {found.device} works longest. "
        return f"{longest}{found.name.capitalize()} takes {found.share:.0%} of its work."
    layer = f"layer {found.layer} ({found.name}), {found.share:.0%} of its work"
    if devices == 1:
        return f"The slowest layer is {layer.replace('its', 'the')}."
    return f"Device {found.device} works longest; its slowest layer is {layer}."


def about_memory(best: Candidate, unlimited: float) -> str:
    """Return a sentence that says how much faster a step would be with more memory.

    The sentence is "" if a step would be faster by 10 % or less.

    Args:
        best: The best setup.
        unlimited: The seconds of the fastest setup whose partitions take equal time, even if that
            setup does not fit the memory.
    """
    if best.seconds <= unlimited * (1 + MUCH):
        return ""
    faster = best.seconds / unlimited - 1
    n = len(best.devices)
    return f"Memory limits the speed: with more of it, n = {n} would be {faster:.0%} faster."


def fastest_alternative(
    found: Mapping[int, Sequence[Alternative]], room: float
) -> Alternative | None:
    """Return the fastest training without a pipeline that fits the memory; `None` if none fits.

    Args:
        found: The predictions without a pipeline, for each number of devices.
        room: How many bytes tensors may take on each device.
    """
    every = chain.from_iterable(found.values())
    fitting = [each for each in every if each.peak <= room]
    return min(fitting, key=lambda each: each.seconds, default=None)


def has_room(alternative: Alternative) -> str:
    """Say that this training fits the memory."""
    if alternative.devices == 1:
        return "Plain training on 1 device has room"
    way = "FSDP" if alternative.way == "FSDP" else "Data parallel training"
    return f"{way} on {alternative.devices} devices has room"


def advice(alternative: Alternative) -> str:
    """Say what to use for this training, which needs no pipeline."""
    if alternative.devices == 1:
        return "no pipeline is needed"
    return f"take {TAKE[alternative.way]} in place of a pipeline"


def about_alternatives(
    best: Candidate, found: Mapping[int, Sequence[Alternative]], room: float
) -> str:
    """Return a sentence that names a faster way to train, without a pipeline.

    The sentence is "" if no other way is faster and fits the memory.

    Args:
        best: The best setup.
        found: The predictions without a pipeline, for each number of devices.
        room: How many bytes tensors may take on each device.
    """
    fastest = fastest_alternative(found, room)
    if fastest is None or fastest.seconds * CLEARLY >= best.seconds:
        return ""
    gain = best.seconds / fastest.seconds - 1
    return f"{has_room(fastest)}, and is {gain:.0%} faster: {advice(fastest)}."


def about_bubble(
    predictor: Predictor,
    best: Candidate,
    by_devices: Mapping[int, Found],
    candidates: Iterable[Candidate],
    room: float,
) -> str:
    """Return a sentence about the bubble, and the gains from a larger batch and the last device.

    The sentence says what share of the devices' time the bubble takes. It also says how many more
    samples per second twice the batch size would give, and how many more the last of the devices
    gives.

    Args:
        predictor: The predictor of the model.
        best: The best setup.
        by_devices: The search's result for each number of devices, also for those where no setup
            fits.
        candidates: The best setup for each number of devices, only for those where a setup fits.
        room: How many bytes tensors may take on each device.
    """
    setup = best.setup
    n = len(best.devices)
    if len(by_devices) == 1:
        return f"The bubble takes {best.bubble:.0%}." if n > 1 else ""
    if n == 1:
        return (
            "Of pipelines, one device is the fastest: what a second one saves, "
            "it loses to the bubble and to copies."
        )
    text = f"At n = {n} the bubble takes {best.bubble:.0%}"
    chunks = 2 * len(setup.sizes)
    most = getattr(setup.schedule, "micro_batches", chunks)
    more = replace(setup, batch_size=2 * setup.batch_size, chunks=min(chunks, most))
    doubled = assess(predictor, more)
    if doubled.peak > room:
        return f"{text}; twice the batch has no room with this balance."
    by_batch = 2 * best.seconds / doubled.seconds - 1
    smaller = [each for each in candidates if len(each.devices) < n]
    if not smaller:
        return f"{text}; twice the batch would bring {by_batch:.0%} more samples/s."
    slower = max(smaller, key=lambda each: len(each.devices))
    fewer = len(slower.devices)
    by_device = (slower.seconds / best.seconds) ** (1 / (n - fewer)) - 1
    helps = "the last device helps more than twice the batch would"
    if by_batch > by_device:
        helps = "twice the batch would help more than the last device does"
    gains = f"{by_batch:+.0%} by the batch, {by_device:+.0%} by the device"
    return f"{text}: {helps} (samples/s: {gains})."
