"""Say in one line why no setup fits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan.amount import amount
from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.count.task_bytes import task_bytes
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.search.balances import Work
from torchgpipe.plan.search.trial import Candidate, assess
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import MODES, Mode


class Impossible(ValueError):
    """Tell in one line why no setup fits."""


def told(setup: Setup) -> str:
    """Say which micro-batches and checkpointing a setup has."""
    return f"chunks={len(setup.sizes)} (micro-batches of {setup.sizes[0]}) and checkpoint={setup.checkpoint!r}"


def refuse_hopeless(
    predictor: Predictor, batch_size: int, devices: int, memory: float, optimizer: Optimizer
) -> None:
    """Raise `Impossible` where every setup is: a layer fits no device, or the devices have no room for all of them."""
    layers = predictor.layers(1).layers
    # A single micro-batch makes each gradient once; of several, each but the first has gradients beside those summed.
    needs = _alone(predictor, batch_size, optimizer, summed=False)
    if batch_size > 1:
        needs = [
            min(pair)
            for pair in zip(needs, _alone(predictor, 1, optimizer, summed=True), strict=True)
        ]
    heaviest = max(range(len(needs)), key=needs.__getitem__)
    if needs[heaviest] > memory:
        raise Impossible(
            f"layer {heaviest} ({layers[heaviest].name}) alone needs {amount(needs[heaviest])} of {amount(memory)}, "
            "with micro-batches of any size: split the layer, or use devices with more memory"
        )
    static = sum(layer.parameters * (2 + optimizer.state) + layer.frozen for layer in layers)
    what = "parameters, gradients and optimizer state"
    if optimizer.together and optimizer.made:
        static += sum(optimizer.temporaries(layer.parameter_sizes) for layer in layers)
        what = "parameters, gradients, optimizer state and what its step makes"
    if static > devices * memory:
        raise Impossible(
            f"{what} need {amount(static)}, and {devices} device(s) have {amount(devices * memory)}: "
            "use more devices, or an optimizer with less state"
        )


def _alone(predictor: Predictor, size: int, optimizer: Optimizer, *, summed: bool) -> list[float]:
    """Return the least bytes of each layer at work on `size` samples, after others if gradients are `summed`.

    Or when it is updated, where that is more.
    """
    footprints = predictor.counts.footprints(size)
    needs = []
    for i, layer in enumerate(predictor.counts.low):
        tasks = [
            task_bytes(footprints, i, i + 1, checkpoint=checkpoint) for checkpoint in (False, True)
        ]
        backward = (
            min(task.kept + (task.later if summed else task.first) for task in tasks)
            + tasks[0].output_grad
        )
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
    schedules: Sequence[str | Schedule] = ("GPipe",),
) -> Candidate:
    """Return which of the setups needs the least, balanced by parameters.

    Raises:
        Impossible: there is no setup: no schedule is for so many devices, layers or micro-batches.
    """
    needed = [
        layer.parameters * (2.0 + optimizer.state) + layer.frozen for layer in predictor.counts.low
    ]
    setups = []
    for m, mode, schedule in product(chunks, modes, schedules):
        setup = Setup(batch_size, (), m, mode, optimizer, schedule=schedule)
        if 0 < (stages := Work(predictor, setup).stages(partitions)) <= len(needed):
            setups.append(replace(setup, balance=tuple(minimise_heaviest(needed, stages))))
    if not setups:
        raise Impossible(
            f"no schedule that was asked for is for {partitions} device(s), {len(needed)} layers and {chunks[0]} "
            "micro-batches or more: choose from others"
        )
    return min([assess(predictor, setup) for setup in setups], key=lambda x: x.peak)


def why(
    predictor: Predictor, allowed: Candidate, batch_size: int, devices: int, memory: float
) -> str:
    """Say how much memory the `allowed` setup lacks, which is the one that needs the least, and what needs less."""
    partitions = min(devices, len(predictor.counts))
    free = least(
        predictor, batch_size, partitions, allowed.setup.optimizer, sorted({1, batch_size}), MODES
    )
    least_of_all, what = told(free.setup), "balanced by parameters"
    if free.peak <= memory:
        return (
            f"what was asked for is in the way: with {told(allowed.setup)}, {what}, the fullest device needs "
            f"{amount(allowed.peak)} of {amount(memory)}; on {partitions} device(s), {least_of_all} needs "
            f"{amount(free.peak)}"
        )
    return (
        f"no balance fits {devices} device(s) of {amount(memory)}: even with {least_of_all}, {what}, "
        f"the fullest needs {amount(free.peak)}; use more devices, or a smaller batch"
    )
