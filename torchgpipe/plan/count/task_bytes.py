"""Compute the memory of a task (one micro-batch on one partition) from its layers' footprints."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields

from torchgpipe.plan.count.footprint import SUMMED, Footprint


@dataclass(frozen=True)
class TaskBytes:
    """The bytes of memory that one task takes: one micro-batch on one partition.

    The task's inputs do not count in a field, unless the description of the field mentions inputs.
    """

    inputs: float
    """The inputs and skips that the partition gets. The mini-batch (first partition) counts 0."""
    forward: float
    """The peak of the forward."""
    graph: float
    """The peak of the pass that builds the autograd graph: the forward or the recomputation."""
    kept: float
    """The tensors that exist after the graph is built. Inputs that the graph saves count, too."""
    output: float
    """The output that the partition gives to the next partition."""
    output_grad: float
    input_grad: float
    first: float
    """How many bytes a backward adds at its peak, if parameters have no gradients before."""
    later: float
    """How many bytes a backward adds at its peak, if parameters have gradients before."""
    summed: float
    """How many bytes a backward adds at its peak, if all micro-batches share one graph.

    Autograd then makes a new tensor for each sum of gradients, and does not add in place. The
    number is NaN unless the partition has all layers: several partitions have separate graphs.
    """
    arrivals: float
    """The skips among the inputs."""


NO_TASK = TaskBytes(*[0.0] * len(fields(TaskBytes)))
"""The bytes of a task that does nothing."""


def task_bytes(
    footprints: Sequence[Footprint], start: int, stop: int, *, checkpoint: bool, copied: bool = True
) -> TaskBytes:
    """Return the bytes of memory that one micro-batch takes on a partition.

    Args:
        footprints: The footprints of all layers of the model, for one micro-batch.
        start: The first layer of the partition.
        stop: The layer after the partition's last layer.
        checkpoint: Whether the task is checkpointed.
        copied: Whether the partition gets copies of its inputs. If not, a tensor that an earlier
            partition's graph has saved counts only for the earlier partition.
    """
    layers = footprints[start:stop]
    whole = len(layers) == len(footprints)
    inputs = set(layers[0].inputs)
    cloned = checkpoint and len(inputs) == 1 and _begins_in_place(layers)
    # The storages that something outside the task keeps alive. For the first partition, for
    # example, the caller keeps the mini-batch. These storages are not counted, and the task does
    # not free them.
    others: set[int] = set()
    if start == 0 and not cloned:
        others |= inputs
    if not copied and not checkpoint:
        for layer in footprints[:start]:
            others.update(layer.saves)
    size = dict.fromkeys(others, 0.0)
    # The clone of the input exists as long as the layers run.
    clone = _total(inputs, dict(layers[0].sizes)) if cloned else 0.0
    saver: dict[int, int] = {}  # for each saved storage, the first layer that saves it
    saved = 0.0
    pending: set[int] = set()
    arrivals: set[int] = set()
    forward = graph = 0.0
    for index, layer in enumerate(layers):
        for number, nbytes in layer.sizes:
            size.setdefault(number, nbytes)
        pops = set(layer.pops)
        arriving = pops - pending
        inputs |= arriving
        arrivals |= arriving
        waiting = {*layer.inputs, *pending, *pops} - inputs
        forward = max(forward, _total(waiting, size) + layer.forward)
        graph = max(graph, _total(waiting - saver.keys(), size) + saved + layer.graph)
        for number in layer.saves:
            if number not in saver:
                saver[number] = index
                if number not in inputs:
                    saved += size[number]
        pending -= pops
        pending.update([stashed.skip for stashed in layer.stashes])
    return TaskBytes(
        inputs=0.0 if start == 0 else _total(inputs, size),
        forward=clone + (forward if checkpoint else graph),
        graph=clone + graph,
        kept=saved + _total(inputs & (others | saver.keys()), size),
        output=_total(set(layers[-1].outputs), size),
        output_grad=layers[-1].output_grad,
        input_grad=layers[0].input_grad,
        first=_backward(layers, others, saver, later=False),
        later=_backward(layers, others, saver, later=True),
        summed=_backward(layers, others, saver, later=True, apart=False) if whole else math.nan,
        arrivals=_total(arrivals, size),
    )


def _backward(
    layers: Sequence[Footprint],
    others: AbstractSet[int],
    saver: Mapping[int, int],
    *,
    later: bool,
    apart: bool = True,
) -> float:
    """Return by how many bytes the memory grows, at most, during the backward of a task.

    The count starts at 0 when the backward begins. What the backward frees is subtracted.

    Args:
        layers: The footprints of the partition's layers.
        others: The storages that something outside the task keeps alive, so that they are not
            freed.
        saver: For each storage that the graph has saved, the first layer that saves it.
        later: Whether an earlier backward of the step has given the parameters gradients.
        apart: Whether the task's graph is separate from the graphs of other tasks. If so, gradients
            are added in place. If not, autograd makes a new tensor for each sum of gradients.
    """
    live = most = 0.0
    held = True  # The caller holds the gradients from which the backward starts.
    for index in reversed(range(len(layers))):
        free_first, free_later, held_first, held_later = layers[index].traces
        if held and not free_first:
            continue  # The layer passes the gradients on unchanged.
        if held:
            trace = held_later if later else held_first
            held = False
        else:
            trace = free_later if later else free_first
        for change in trace:
            number = change.storage
            if number is not None and (number in others or saver.get(number, index) < index):
                continue  # Something outside the task, or an earlier layer, holds the storage.
            if number == SUMMED and not apart:
                most = max(most, live - change.bytes)
            live += change.bytes
            if live > most:
                most = live
    return most


def _begins_in_place(layers: Sequence[Footprint]) -> bool:
    """Return whether a partition changes its input in place, so that checkpointing must clone it.

    Layers that just return their input are skipped. The partition changes its input in place if the
    first other layer does.
    """
    for layer in layers:
        if layer.in_place or layer.outputs != layer.inputs:
            return layer.in_place
    return False


def _total(numbers: AbstractSet[int], size: Mapping[int, float]) -> float:
    return sum([size[number] for number in numbers])
