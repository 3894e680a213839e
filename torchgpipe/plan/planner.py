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
from torchgpipe.plan.count.loss import loss_of
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.hardware.amount import parse_amount
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.precision import check_precision, precision_of
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.profiled import predictor_here
from torchgpipe.plan.reasons import advice, fastest_alternative, has_room
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.alternatives import Alternative, alternatives
from torchgpipe.plan.search.impossible import Impossible, refuse_hopeless
from torchgpipe.plan.search.search import Aim, Found, merged, search, unheard
from torchgpipe.plan.search.trial import Candidate, Choices
from torchgpipe.schedules import Schedule, make
from torchgpipe.step.request import Criterion
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of

HERE = "here"
"""The value of `hardware` that asks for a profile on the sample's device."""
HARDLY = 1.005
"""More devices are not used if the step is shorter by less than this factor."""


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
    criterion: Criterion | None = None,
    target: Any = None,
    progress: Callable[[str], object] = unheard,
) -> Plan:
    """Find the pipeline for `module` with the shortest predicted step that fits the memory.

    The seconds of a step are predicted in one of two ways:

    - From a hardware description. Each layer's operators are counted on the `meta` device, which
      needs no GPU, and no memory for the model.
    - From a profile. The layers are timed on the sample's device. If the device has enough memory,
      they are timed in training steps of the whole model, without a pipeline. This takes about as
      long as fifteen training steps with the sample.

    The bytes of memory are counted on the `meta` device in both cases.

    Args:
        module: The layers, on any device, also on `meta`.
        sample: An input of the module, a tensor or a tuple of tensors. For a profile, the sample is
            on the device to profile on, and as large as the largest micro-batch to consider.
            Otherwise its device and its batch size do not matter.
        batch_size: The number of samples in a mini-batch.
        devices: The largest number of devices to use; by default all devices of the node.
        memory: The memory of each device, in bytes or as text such as "24GiB"; by default the
            memory that the node's devices have.
        headroom: The memory to leave free for PyTorch's allocator, as a share of the tensors'
            bytes. The default is 0.15 on a GPU, because its caching allocator reserves more memory
            than the tensors take, and 0 on a CPU. See `Hardware.room`.
        hardware: The hardware to predict for: a hardware description, its name such as "h100x8", or
            its file; `hardware_names` lists the names. With the default "here", the layers are
            timed on the sample's device, and the prediction is for several such devices. If the
            sample's device is a CPU, each device has as many cores as PyTorch has threads, and all
            devices have equal shares of the memory.
        optimizer: One of "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" and "adamw", with
            PyTorch's defaults. The optimizer decides how much memory its state takes and its step
            allocates. On a GPU, the step is taken to update all parameters at once (`foreach`).
        chunks: The numbers of micro-batches to choose from, or a single number. By default, the
            plan tries all numbers that give different micro-batch sizes.
        checkpoint: The checkpoint modes to choose from, or a single mode.
        schedules: The schedules to choose from, or a single schedule, as in `GPipe(schedule=…)`.
            Interleaved1F1B has two stages on each device.
        autocast: The dtype of autocast in training, such as `torch.bfloat16`. By default, it is the
            dtype of the autocast that is enabled when `plan` is called.
        master_weights: Whether the optimizer keeps a float32 copy of parameters in 16 bits.
        criterion: The criterion of the training, as for `GPipe.step`, to predict the seconds and
            the bytes of the loss, too. For a language model with a large vocabulary, the loss can
            take as much time and memory as all other layers of the last stage. By default,
            predictions are without a loss. The criterion's own parameters are not counted.
        target: The target of the sample: tensors with one entry for each sample, also within
            tuples, lists, mappings and dataclasses.
        progress: A function that is called again and again with one line of text, which says what
            the planner is doing.

    Returns:
        The plan: the best setup, its prediction, and other setups to compare it with.

    Raises:
        TypeError: If an argument has a wrong type, or a skip is not stashed once and popped once.
        ValueError: If a value is out of range.
        Impossible: A `ValueError`, raised if no setup fits the memory. The message says why.
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
    loss = loss_of(criterion, target, module, sample)
    asked = None if memory is None else parse_amount(memory)
    _check_headroom(headroom)

    on_cpu = node.cpu if node is not None else tensors_of(sample)[0].device.type == "cpu"
    kind = "cpu" if on_cpu else accelerator.KIND
    progress("counting the operators of the layers")
    counts = count(module, sample, device=kind, autocast=autocast, loss=loss)
    if node is None:
        progress("timing the layers")
        with nullcontext() if autocast is None else torch.autocast(kind, autocast):
            here = predictor_here(module, sample, counts, devices=devices, memory=asked, loss=loss)
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
    return Plan(
        _in_order([each.best for each in by_devices.values() if each.best is not None]),
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


def _in_order(candidates: list[Candidate]) -> list[Candidate]:
    """Return the best setup, followed by the other setups, the fastest first.

    The best setup has the fewest devices, among all setups that are nearly as fast as the fastest
    one (see `HARDLY`).
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.seconds)
    near = [each for each in ordered if each.seconds <= ordered[0].seconds * HARDLY]
    best = min(near, key=lambda candidate: len(candidate.devices))
    ordered.remove(best)
    return [best, *ordered]


@contextmanager
def _naming_another_way(beside: Mapping[int, Sequence[Alternative]], room: float) -> Iterator[None]:
    """Within this context, add another way of training to the error that no pipeline fits.

    Args:
        beside: The predictions of data parallel training and FSDP, for each number of devices.
        room: How many bytes tensors may take on each device.

    Raises:
        Impossible: If this error was raised in the context. Its message then also names the fastest
            way of training that fits the memory, if there is one.
    """
    try:
        yield
    except Impossible as error:
        several = {n: found for n, found in beside.items() if n > 1}
        fastest = fastest_alternative(several, room)
        if fastest is None:
            raise
        raise Impossible(f"{error}; {has_room(fastest)}: {advice(fastest)}") from None


def _by_schedule(
    schedules: Sequence[str | Schedule], found: Sequence[Mapping[int, Found]]
) -> list[tuple[str, Candidate | None]]:
    """Return for each schedule a pair: its name, and its best setup or `None` if no setup fits.

    Args:
        schedules: The schedules.
        found: For each of these schedules, the best setup for each number of devices.
    """
    best = []
    for schedule, own in zip(schedules, found, strict=True):
        fastest = min(own.values(), key=lambda setups: setups.limit)
        name = schedule.name if isinstance(schedule, Schedule) else make(schedule, 1, 1).name
        best.append((name, fastest.best))
    return best


def _numbers(most: int) -> list[int]:
    """Return the numbers of partitions that the search tries, for at most `most` partitions.

    To save time, not all numbers above 16 are tried. The list has `most` and some smaller numbers:
    all numbers up to 16, powers of two, and powers of two times three.
    """
    numbers = {*range(1, min(most, 16) + 1), most}
    for power in range(3, 12):
        for number in (2 << power, 3 << power):
            if number <= most:
                numbers.add(number)
    return sorted(numbers)


def _check_number(name: str, given: Any, most: int | None = None) -> None:
    """Raise `ValueError` unless the argument called `name` is a whole number of at least 1.

    If `most` (the batch size) is given, the number must also be at most `most`.
    """
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or not 1 <= given <= (most or given):
        allowed = f"from 1 to the batch size {most}" if most else "of at least 1"
        raise ValueError(f"{name} must be a whole number {allowed}, got {given!r}")


def _check_mode(mode: object) -> None:
    if mode not in MODES:
        raise ValueError(f"checkpoint must be among {', '.join(map(repr, MODES))}, got {mode!r}")


def _check_schedule(schedule: str | Schedule) -> None:
    """Raise an error if a schedule is not valid, so that no pipeline can run it."""
    if isinstance(schedule, Schedule):
        schedule.replay(buffered=1)
    else:
        make(schedule, 1, 1)


def _check_headroom(headroom: Any) -> None:
    number = isinstance(headroom, (int, float)) and not isinstance(headroom, bool)
    if headroom is not None and not (number and 0 <= headroom < inf):
        raise ValueError(
            "headroom must be a share of the tensors' bytes, 0 or more, such as 0.15 for 15 %, "
            f"but got {headroom!r}"
        )


def _several(name: str, given: Any, what: str, check: Callable[[Any], None]) -> list[Any]:
    """Convert an argument, which is one item or a sequence of items, to a list of items.

    Args:
        name: The name of the argument, for error messages.
        given: The argument.
        what: What one item is, such as "schedule", for error messages.
        check: A function that raises an error if an item is not valid. It is called on each item.
    """
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
