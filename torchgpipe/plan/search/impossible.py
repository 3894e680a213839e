"""Raise an error if no setup fits the devices' memory, and say in one line why none fits."""

from dataclasses import replace
from itertools import product

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.caught import how_many
from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.count.task_bytes import task_bytes
from torchgpipe.plan.hardware.amount import amount
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.plan.search.balances import Work, held_by_layers
from torchgpipe.plan.search.trial import Candidate, Choices, assess

HELPS = 0.9
"""Twice as many devices help if the fullest device then needs at most this share of its memory."""


class Impossible(ValueError):
    """No setup fits the memory of the devices. The message says why, in one line."""


def told(setup: Setup) -> str:
    """Describe a setup in a few words for a message: its micro-batches and its checkpoint mode."""
    sizes = setup.sizes
    micro_batches = f"chunks={len(sizes)} (micro-batches of {sizes[0]})"
    return f"{micro_batches} and checkpoint={setup.checkpoint!r}"


def refuse_hopeless(
    predictor: Predictor, batch_size: int, devices: int, memory: float, optimizer: Optimizer
) -> None:
    """Raise an error if it is clear without a search that no setup fits the devices' memory.

    Args:
        predictor: The predictor of the model.
        batch_size: The number of samples in a mini-batch.
        devices: How many devices there are.
        memory: How many bytes tensors may take on each device.
        optimizer: The memory that the optimizer takes.

    Raises:
        Impossible: If one layer alone needs more memory than a device has, or if parameters,
            gradients and the optimizer's state need more memory than all devices have together.
    """
    layers = predictor.layers(1).layers
    # Try the largest and the smallest micro-batches, because one of the two needs the least memory.
    # With one micro-batch, activations of many samples exist, but each gradient is made only once.
    # With micro-batches of one sample, activations are small, but a backward allocates gradients
    # while the sum of earlier gradients exists.
    needs = _alone(predictor, batch_size, optimizer, summed=False)
    if batch_size > 1:
        needs = list(map(min, needs, _alone(predictor, 1, optimizer, summed=True)))
    most = max(needs)
    if most > memory:
        heaviest = needs.index(most)
        raise Impossible(
            f"layer {heaviest} ({layers[heaviest].name}) alone needs {amount(most)}, more than the "
            f"{amount(memory)} that tensors may take on a device, with any micro-batch size: "
            "split the layer into several, or use devices with more memory"
        )
    once = predictor.counts.once
    static = sum(held_by_layers(once, optimizer))
    what = "parameters, gradients and optimizer state"
    if optimizer.together and optimizer.made:
        static += sum([optimizer.temporaries(layer.parameter_sizes) for layer in once])
        what = "parameters, gradients, optimizer state and what its step makes"
    room = devices * memory
    if static > room:
        raise Impossible(
            f"the model's {what} need {amount(static)}, but tensors may take only {amount(room)} "
            f"on {how_many(devices, 'device')}: "
            "use more devices, or an optimizer with less state"
        )


def _alone(predictor: Predictor, size: int, optimizer: Optimizer, *, summed: bool) -> list[float]:
    """Return for each layer how many bytes a device would need if it had no other layer.

    These bytes are the peak during a forward or a backward of `size` samples, or during the
    optimizer's step. If `summed` is true, the backward adds its gradients to earlier gradients.
    """
    footprints = predictor.counts.footprints(size)
    needs = []
    for i, layer in enumerate(predictor.counts.low):
        plain = task_bytes(footprints, i, i + 1, checkpoint=False)
        checkpointed = task_bytes(footprints, i, i + 1, checkpoint=True)
        if summed:
            backward = min(plain.kept + plain.later, checkpointed.kept + checkpointed.later)
            backward += plain.output_grad + layer.parameters
        else:
            backward = min(plain.kept + plain.first, checkpointed.kept + checkpointed.first)
            backward += plain.output_grad
        forward = plain.inputs + plain.graph
        update = layer.parameters + optimizer.temporaries(layer.parameter_sizes)
        static = layer.parameters * (1 + optimizer.state) + layer.frozen
        needs.append(static + max(forward, backward, update))
    return needs


def least(predictor: Predictor, partitions: int, choices: Choices) -> Candidate:
    """Return the setup whose fullest device needs the least memory.

    Only one balance is tried for each number of micro-batches, checkpoint mode and schedule: the
    one that divides parameters evenly.

    Args:
        predictor: The predictor of the model.
        partitions: How many devices there are.
        choices: The numbers of micro-batches, checkpoint modes and schedules to choose from. If any
            number of micro-batches is allowed, two are tried: one micro-batch, and micro-batches of
            one sample.

    Raises:
        Impossible: If no schedule can run with these numbers of devices, layers and micro-batches.
    """
    batch_size, optimizer, allowed, modes, schedules = choices
    needed = held_by_layers(predictor.counts.once, optimizer)
    chunks = sorted(set(allowed or (1, batch_size)))
    found = []
    for m, mode, schedule in product(chunks, modes, schedules):
        setup = Setup(batch_size, (), m, mode, optimizer, schedule=schedule)
        stages = Work(predictor, setup).stages(partitions)
        if 0 < stages <= len(needed):
            balance = tuple(minimise_heaviest(needed, stages))
            found.append(assess(predictor, replace(setup, balance=balance)))
    if not found:
        raise Impossible(
            f"none of the schedules that were asked for can run {len(needed)} layers on "
            f"{how_many(partitions, 'device')} with {chunks[0]} or more micro-batches: allow other "
            "schedules"
        )
    return min(found, key=lambda candidate: candidate.peak)


def why(
    predictor: Predictor, allowed: Candidate, batch_size: int, devices: int, memory: float
) -> str:
    """Return the message of the error that is raised if no setup fits the memory.

    The message says how much memory is needed, and names a setup that needs less, if there is one.

    Args:
        predictor: The predictor of the model.
        allowed: The setup that needs the least memory, among the setups that the user allows.
        batch_size: The number of samples in a mini-batch.
        devices: How many devices there are.
        memory: How many bytes tensors may take on each device.
    """
    partitions = min(devices, len(predictor.counts))
    free = least(predictor, partitions, Choices(batch_size, allowed.setup.optimizer))
    balanced = "balanced by parameters"
    room, free_peak, free_setup = amount(memory), amount(free.peak), told(free.setup)
    if free.peak <= memory:
        return (
            "the chunks, checkpoint modes or schedules that were asked for need too much memory: "
            f"with {told(allowed.setup)}, {balanced}, the fullest device needs "
            f"{amount(allowed.peak)} of {room}; on {how_many(partitions, 'device')}, {free_setup} "
            f"needs only {free_peak}"
        )
    return (
        f"no balance fits {how_many(devices, 'device')} of {room}: "
        f"even with {free_setup}, {balanced}, the fullest device needs {free_peak}; "
        + _what_helps(predictor, free, partitions, memory)
    )


def _what_helps(predictor: Predictor, free: Candidate, partitions: int, memory: float) -> str:
    """Say what would make a setup fit: another schedule, more devices, or a smaller batch.

    Args:
        predictor: The predictor of the model.
        free: The setup that needs the least memory under the schedule `GPipe`.
        partitions: How many devices there are.
        memory: How many bytes tensors may take on each device.
    """
    batch_size, optimizer = free.setup.batch_size, free.setup.optimizer
    # Under 1F1B, a device keeps fewer micro-batches at a time, and the last one keeps one output.
    try:
        other = least(predictor, partitions, Choices(batch_size, optimizer, schedules=["1F1B"]))
    except Impossible:  # there are fewer layers than stages
        other = free
    if other.peak <= memory:
        return (
            f"but with the schedule 1F1B, {told(other.setup)} needs only {amount(other.peak)}: "
            "allow it, schedules=['1F1B'] or --schedules 1F1B"
        )
    more = min(2 * partitions, len(predictor.counts))
    wider = least(predictor, more, Choices(batch_size, optimizer))
    if wider.peak < HELPS * free.peak:
        return "use more devices, or a smaller batch"
    return "use a smaller batch, or devices with more memory (more devices would hardly help)"
