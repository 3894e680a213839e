"""Choose a model's balance, number of micro-batches, checkpoint mode and schedule by prediction."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.nn import Sequential

from torchgpipe.balance.profile import checked_sample
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.hardware.amount import parse_amount
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.precision import check_precision, precision_of
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.profiled import predictor_here
from torchgpipe.plan.reasons import TAKE, fastest_alternative, has_room
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.alternatives import Alternative, alternatives
from torchgpipe.plan.search.impossible import Impossible, refuse_hopeless
from torchgpipe.plan.search.search import Aim, Found, merged, search, unheard
from torchgpipe.plan.search.trial import Candidate, Choices
from torchgpipe.schedules import Schedule, make
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of

HERE = "here"
"""The value of `hardware` that asks for a profile on the sample's device."""


def plan(  # noqa: PLR0913 - each is an option of the user's
    module: Sequential,
    sample: TensorOrTensors,
    *,
    batch_size: int,
    devices: int | None = None,
    memory: str | float | None = None,
    headroom: float | None = None,
    hardware: str | Path | Hardware = HERE,
    optimizer: str = "sgd",
    chunks: int | Sequence[int] | None = None,
    checkpoint: Mode | Sequence[Mode] = MODES,
    schedules: str | Schedule | Sequence[str | Schedule] = "GPipe",
    autocast: torch.dtype | None = None,
    master_weights: bool = False,
    progress: Callable[[str], object] = unheard,
) -> Plan:
    """Plan a pipeline for `module`: find the fastest setup that fits the memory.

    The plan predicts the seconds of a step in one of two ways:

    - From a hardware description. Each layer's operators are counted on the `meta` device, which
      needs no GPU, and no memory for the model.
    - From a profile. The layers are timed on the sample's device, in steps of the whole model if
      such a step fits the memory. This takes about as long as fifteen steps on the sample.

    The bytes are always counted on the `meta` device.

    Args:
        module: The layers, on any device, also on `meta`.
        sample: An input of the module, a tensor or a tuple of tensors. For a profile, the sample is
            on the device to profile on, and as large as the largest micro-batch to consider.
            Otherwise its device and its batch size do not matter.
        batch_size: The number of samples in a mini-batch.
        devices: The largest number of devices to use; by default all devices of the node.
        memory: The memory of each device, in bytes or as text such as "24GiB"; by default the
            memory that the node's devices have.
        headroom: The memory that is left to the allocator, as a share of the tensors' bytes. The
            default is 0.15 on a GPU, whose caching allocator reserves more than tensors take, and 0
            on a CPU. See `Hardware.room`.
        hardware: A hardware description, its name such as "h100x8", or its file; `hardware_names`
            lists the names. The default "here" profiles on the sample's device, and predicts for
            several devices like the sample's. A CPU device then has as many cores as PyTorch has
            threads, and an equal share of the memory.
        optimizer: One of "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" and "adamw", with
            PyTorch's defaults. It decides how large the optimizer's state is and what its step
            allocates. On a GPU, the step updates all parameters at once.
        chunks: The numbers of micro-batches to choose from, or a single number. By default, the
            plan tries all numbers that give different micro-batch sizes.
        checkpoint: The checkpoint modes to choose from, or a single mode.
        schedules: The schedules to choose from, or a single schedule, as in `GPipe(schedule=…)`.
            Interleaved1F1B has two stages on each device.
        autocast: The dtype of autocast in training, such as `torch.bfloat16`. By default, it is
            the dtype of the autocast that is enabled when `plan` is called.
        master_weights: Whether the optimizer keeps a float32 copy of parameters in 16 bits.
        progress: Called again and again with a line that says what the planner does now.

    Returns:
        The plan: the best setup, its prediction, and other setups to compare it with.

    Raises:
        TypeError: If an argument has a wrong type, or a skip is not stashed once and popped once.
        ValueError: If a value is out of range.
        Impossible: If no setup fits (a ValueError). The message says why.
    """
    sample = checked_sample(module, sample, "planned")
    node = None
    if isinstance(hardware, Hardware):
        node = hardware
    elif hardware != HERE:
        node = load_hardware(hardware)
    _check_number("batch_size", batch_size)
    if devices is not None:
        _check_number("devices", devices)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    modes = _several("checkpoint", checkpoint, "mode", _check_mode)
    orders = _several("schedules", schedules, "schedule", _check_schedule)
    numbers = None
    if chunks is not None:
        check = partial(_check_number, "chunks", most=batch_size)
        numbers = _several("chunks", chunks, "whole number", check)
    check_precision(module, autocast, master_weights=master_weights)
    asked = None if memory is None else parse_amount(memory)
    _check_headroom(headroom)

    on_cpu = node.cpu if node is not None else tensors_of(sample)[0].device.type == "cpu"
    kind = "cpu" if on_cpu else accelerator.KIND
    progress("counting the operators of the layers")
    counts = count(module, sample, device=kind, autocast=autocast)
    if node is None:
        progress("timing the layers")
        with nullcontext() if autocast is None else torch.autocast(kind, autocast):
            here = predictor_here(module, sample, counts, devices=devices, memory=asked)
        predictor: Predictor = here
        node = here.hardware
        source = f"{here.profile}; {node.sources['link_bandwidth']}"
    else:
        predictor = Predictor(counts, node)
        source = f"hardware description {node.name}"
    each = node.memory if asked is None else asked
    room = node.room(each, headroom)
    most = node.devices if devices is None else devices
    if most > node.devices:
        source += f", which has {node.devices} devices: more of them are taken to be linked alike"
    held = optimizer_named(optimizer, foreach=not node.cpu, master_weights=master_weights)
    refuse_hopeless(predictor, batch_size, most, room, held)
    choices = Choices(batch_size, held, numbers, modes, orders)
    partitions = _numbers(min(most, len(counts)))
    beside = {n: alternatives(predictor, batch_size, n, held, room) for n in partitions}
    with _naming_another_way(beside, room):
        found = search(predictor, choices, partitions, Aim(room, progress=progress))
    by_devices = merged(found)
    candidates = [setups.best for setups in by_devices.values() if setups.best is not None]
    candidates.sort(key=lambda candidate: candidate.seconds)
    return Plan(
        candidates,
        bound=min([setups.bound for setups in by_devices.values()]),
        memory=each,
        room=room,
        precision=precision_of(counts, node, autocast, master_weights=master_weights),
        hardware=node,
        source=source,
        by_devices=by_devices,
        by_schedule=_by_schedule(orders, found),
        beside=beside,
        predictor=predictor,
        module=module,
    )


@contextmanager
def _naming_another_way(beside: Mapping[int, Sequence[Alternative]], room: float) -> Iterator[None]:
    """If no pipeline fits the memory, add to the error which other way of training fits it."""
    try:
        yield
    except Impossible as error:
        several = {n: found for n, found in beside.items() if n > 1}
        fastest = fastest_alternative(several, room)
        if fastest is None:
            raise
        raise Impossible(f"{error}; {has_room(fastest)}: take {TAKE[fastest.way]}") from None


def _by_schedule(
    schedules: Sequence[str | Schedule], found: Sequence[Mapping[int, Found]]
) -> list[tuple[str, Candidate | None]]:
    """Return each schedule's name and its best setup."""
    best = []
    for schedule, own in zip(schedules, found, strict=True):
        fastest = min(own.values(), key=lambda setups: setups.limit)
        name = schedule.name if isinstance(schedule, Schedule) else make(schedule, 1, 1).name
        best.append((name, fastest.best))
    return best


def _numbers(most: int) -> list[int]:
    """Return the numbers of partitions to choose from.

    The list has `most` and these smaller numbers: all up to 16, then powers of two, and three times
    powers of two.
    """
    numbers = {*range(1, min(most, 16) + 1), most}
    for power in range(3, 12):
        for number in (2 << power, 3 << power):
            if number <= most:
                numbers.add(number)
    return sorted(numbers)


def _check_number(name: str, given: Any, most: int | None = None) -> None:
    """Raise an error unless `given` is an int, at least 1 and at most `most` (the batch size)."""
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or not 1 <= given <= (most or given):
        allowed = f"from 1 to the batch size {most}" if most else "of at least 1"
        raise ValueError(f"{name} must be a whole number {allowed}, got {given!r}")


def _check_mode(mode: object) -> None:
    if mode not in MODES:
        raise ValueError(f"checkpoint must be among {', '.join(map(repr, MODES))}, got {mode!r}")


def _check_schedule(schedule: str | Schedule) -> None:
    """Raise an error if no pipeline can run the schedule."""
    if isinstance(schedule, Schedule):
        schedule.replay(buffered=1)
    else:
        make(schedule, 1, 1)


def _check_headroom(headroom: Any) -> None:
    number = isinstance(headroom, (int, float)) and not isinstance(headroom, bool)
    if headroom is not None and not (number and 0 <= headroom < inf):
        raise ValueError(
            "headroom must be a share of the tensors' bytes, 0 or more, such as 0.15 for 15 %; "
            f"got {headroom!r}"
        )


def _several(name: str, given: Any, what: str, check: Callable[[Any], None]) -> list[Any]:
    """Check one item, or each item of a sequence; return the items as a list."""
    if isinstance(given, (str, int, Schedule)):
        items = [given]
    elif isinstance(given, Iterable):
        items = list(given)
    else:
        raise TypeError(f"{name} must be one {what} or a sequence of them, got {given!r}")
    if not items:
        raise ValueError(f"{name} must name at least one {what}, got none")
    for item in items:
        check(item)
    return items
