"""Say in one line why no setup fits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan.amount import amount
from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.count.task_bytes import task_bytes
from torchgpipe.plan.memory import setup_memory
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.tensors.checkpoint import MODES, Mode


class Impossible(ValueError):
    """Tell in one line why no setup fits."""


class Least(NamedTuple):
    """That one of several setups that needs the least memory, and the bytes of its fullest device."""

    setup: Setup
    peak: float

    def __str__(self) -> str:
        sizes = self.setup.sizes
        return f"chunks={len(sizes)} (micro-batches of {sizes[0]}) and checkpoint={self.setup.checkpoint!r}"


def hopeless(predictor: Predictor, batch_size: int, devices: int, memory: float, optimizer: Optimizer) -> str | None:
    """Say what makes every setup impossible: a layer that fits no device, or all of them together; else `None`."""
    layers = predictor.layers(1).layers
    # A single micro-batch makes each gradient once; of several, each but the first has gradients beside those summed.
    needs = _alone(predictor, batch_size, optimizer, summed=False)
    if batch_size > 1:
        needs = [min(pair) for pair in zip(needs, _alone(predictor, 1, optimizer, summed=True), strict=True)]
    heaviest = max(range(len(needs)), key=needs.__getitem__)
    if needs[heaviest] > memory:
        return (
            f"layer {heaviest} ({layers[heaviest].name}) alone needs {amount(needs[heaviest])} of {amount(memory)}, "
            "with micro-batches of any size: split the layer, or use devices with more memory"
        )
    static = sum(layer.parameters * (2 + optimizer.state) + layer.frozen for layer in layers)
    what = "parameters, gradients and optimizer state"
    if optimizer.together and optimizer.made:
        static += sum(optimizer.temporaries(layer.parameter_sizes) for layer in layers)
        what = "parameters, gradients, optimizer state and what its step makes"
    if static > devices * memory:
        return (
            f"{what} need {amount(static)}, and {devices} device(s) have {amount(devices * memory)}: "
            "use more devices, or an optimizer with less state"
        )
    return None


def _alone(predictor: Predictor, size: int, optimizer: Optimizer, *, summed: bool) -> list[float]:
    """Return the least bytes of each layer at work on `size` samples, after others if gradients are `summed`.

    Or when it is updated, where that is more.
    """
    footprints = predictor.counts.footprints(size)
    needs = []
    for i, layer in enumerate(predictor.counts.low):
        tasks = [task_bytes(footprints, i, i + 1, checkpoint=checkpoint) for checkpoint in (False, True)]
        backward = min(task.kept + (task.later if summed else task.first) for task in tasks) + tasks[0].output_grad
        backward += layer.parameters if summed else 0.0
        update = layer.parameters + optimizer.temporaries(layer.parameter_sizes)
        static = layer.parameters * (1 + optimizer.state) + layer.frozen
        needs.append(static + max(tasks[0].inputs + tasks[0].graph, backward, update))
    return needs


def least(
    predictor: Predictor,
    batch_size: int,
    partitions: int,
    optimizer: Optimizer,
    chunks: Sequence[int],
    modes: Sequence[Mode],
) -> Least:
    """Return which of the setups needs the least, balanced by parameters."""
    needed = [layer.parameters * (2.0 + optimizer.state) + layer.frozen for layer in predictor.counts.low]
    setup = Setup(batch_size, tuple(minimise_heaviest(needed, partitions)), optimizer=optimizer)
    setups = [replace(setup, chunks=m, checkpoint=mode) for m in chunks for mode in modes]
    found = [Least(s, max(d.peak for d in setup_memory(predictor.counts, s))) for s in setups]
    return min(found, key=lambda x: x.peak)


def why(predictor: Predictor, allowed: Least, batch_size: int, devices: int, memory: float) -> str:
    """Say how much memory the `allowed` setup lacks, which is the one that needs the least, and what needs less."""
    partitions = min(devices, len(predictor.counts))
    free = least(predictor, batch_size, partitions, allowed.setup.optimizer, sorted({1, batch_size}), MODES)
    if free.peak <= memory:
        return (
            f"what was asked for is in the way: with {allowed}, balanced by parameters, the fullest device needs "
            f"{amount(allowed.peak)} of {amount(memory)}; on {partitions} device(s), {free} needs {amount(free.peak)}"
        )
    return (
        f"no balance fits {devices} device(s) of {amount(memory)}: even with {free}, balanced by parameters, "
        f"the fullest needs {amount(free.peak)}; use more devices, or a smaller batch"
    )
