"""`plan`: choose balance, micro-batches, checkpointing and schedule for a model, by prediction."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchgpipe.balance.profile import checked_sample
from torchgpipe.plan.amount import parse_amount
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.plan.report import Plan
from torchgpipe.plan.search.impossible import refuse_hopeless
from torchgpipe.plan.search.search import search
from torchgpipe.plan.search.trial import data_parallel
from torchgpipe.schedules import Schedule, make
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of

HERE = "here"
"""In place of a hardware description's name: profile on the present device."""


def plan(
    module: nn.Sequential,
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
) -> Plan:
    """Plan a pipeline for `module`.

    Seconds come from a hardware description, for which the layers are counted on the `meta` device, so that neither a
    GPU nor memory for the model is needed; or from a profile on the present device, which times them in whole steps
    where these fit, and takes about as long as fifteen steps of the sample. Bytes are counted either way.

    Args:
        module: the layers, on any device, `meta` too.
        sample: an input like those to come, a tensor or a tuple of tensors. For a profile it is on the device to
            profile on and as large as the largest micro-batch to be considered; otherwise neither matters.
        batch_size: samples of a mini-batch.
        devices: how many there are at most; by default the node's.
        memory: what each has, in bytes or as text such as "24GiB"; by default the node's.
        headroom: what to leave of it to the allocator, as a share of the tensors' bytes; by default 0.15 on a GPU,
            whose caching allocator reserves more than tensors take, and nothing on a CPU. See `Hardware.room`.
        hardware: a description's name, such as "h100x8", its file, or itself; see `hardware_names`. By default "here":
            profile on the sample's device, and predict for devices like it. On a CPU a device has as many cores as
            PyTorch has threads, and an equal share of the memory.
        optimizer: one of "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" and "adamw", for its state and what
            its step makes, with PyTorch's defaults: on a GPU, all parameters are updated at once.
        chunks: the numbers of micro-batches to choose from, or the only one; by default all that differ.
        checkpoint: the modes to choose from, or the only one.
        schedules: what to choose from, or the only one, as for `GPipe(schedule=…)`; of Interleaved1F1B with two stages
            on each device.
        autocast: the type of numbers that training's autocast has, such as `torch.bfloat16`; by default, that of the
            autocast that is enabled where `plan` is called.
        master_weights: whether the optimizer keeps a float32 copy of parameters in 16 bits.

    Raises:
        TypeError: a wrong type, or skips that do not match.
        ValueError: a value out of range, or no setup fits (`Impossible`); the message says why.
    """
    sample = checked_sample(module, sample, "planned")
    node = (
        None
        if hardware == HERE
        else hardware
        if isinstance(hardware, Hardware)
        else load_hardware(hardware)
    )
    _check_number("batch_size", batch_size)
    if devices is not None:
        _check_number("devices", devices)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    modes = _several("checkpoint", checkpoint, "mode")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(
                f"checkpoint must be among {', '.join(map(repr, MODES))}, got {mode!r}"
            )
    orders = _several("schedules", schedules, "schedule")
    for schedule in orders:
        # Both refuse what no pipeline can do.
        schedule.replay(buffered=1) if isinstance(schedule, Schedule) else make(schedule, 1, 1)
    numbers = None if chunks is None else _several("chunks", chunks, "whole number")
    for m in numbers or ():
        _check_number("chunks", m, batch_size)
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16 or torch.bfloat16, got {autocast!r}")
    if master_weights and any(
        p.element_size() != 2 for p in module.parameters() if p.requires_grad
    ):
        raise ValueError(
            "master_weights is for parameters in 16 bits: others are updated as they are, so leave it out"
        )
    given = None if memory is None else parse_amount(memory)
    number = isinstance(headroom, (int, float)) and not isinstance(headroom, bool)
    if headroom is not None and not (number and 0 <= headroom < inf):
        raise ValueError(
            f"headroom must be a share of the tensors' bytes, from 0 on, such as 0.15 for 15 %; got {headroom!r}"
        )
    cpu = node.cpu if node is not None else tensors_of(sample)[0].device.type == "cpu"
    kind = "cpu" if cpu else "cuda"
    counts = count(module, sample, device=kind, autocast=autocast)
    if node is None:
        with nullcontext() if autocast is None else torch.autocast(kind, autocast):
            here = predictor_here(module, sample, counts, devices=devices, memory=given)
        predictor: Predictor = here
        node, source = here.hardware, f"{here.profile}; {here.hardware.sources['link_bandwidth']}"
    else:
        predictor, source = Predictor(counts, node), f"hardware description {node.name}"
    each = node.memory if given is None else given
    tensors = node.room(each, headroom)
    most = node.devices if devices is None else devices
    if most > node.devices:
        source += f", which has {node.devices} devices: more of them are taken to be linked alike"
    state = optimizer_named(optimizer, foreach=not node.cpu, master_weights=master_weights)
    refuse_hopeless(predictor, batch_size, most, tensors, state)
    found = search(
        predictor,
        batch_size=batch_size,
        memory=tensors,
        partitions=_numbers(min(most, len(counts))),
        optimizer=state,
        chunks=numbers,
        checkpoint=modes,
        schedules=orders,
    )
    candidates = sorted(
        (each.best for each in found.values() if each.best is not None), key=lambda c: c.seconds
    )
    bound = min(each.bound for each in found.values())
    beside = [data_parallel(predictor, batch_size, n, state) for n in found]
    return Plan(candidates, bound, each, tensors, node, source, found, beside, predictor, module)


def _numbers(most: int) -> list[int]:
    """Return the numbers of partitions to choose from: every one to 16, then fewer, and the most."""
    return sorted(
        {n for n in (*range(1, 17), *(k << i for i in range(3, 12) for k in (2, 3))) if n <= most}
        | {most}
    )


def _check_number(name: str, given: object, batch_size: int | None = None) -> None:
    if (
        not isinstance(given, int)
        or isinstance(given, bool)
        or not 1 <= given <= (batch_size or given)
    ):
        allowed = f"from 1 to the batch size {batch_size}" if batch_size else "of at least 1"
        raise ValueError(f"{name} must be a whole number {allowed}, got {given!r}")


def _several(name: str, given: Any, what: str) -> list[Any]:
    """Return what was given as a list: one thing, or any sequence of them but an empty one."""
    if isinstance(given, (str, int, Schedule)):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be one {what} or a sequence of them, got {given!r}")
    if not (found := list(given)):
        raise ValueError(f"{name} must name at least one {what}, got none")
    return found
