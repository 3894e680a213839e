"""`plan`: choose balance, micro-batches and checkpointing for a model, by prediction."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import nn

from torchgpipe.gpipe import GPipe
from torchgpipe.plan.amount import parse_amount
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import OPTIMIZERS, optimizer_named
from torchgpipe.plan.hardware.hardware import Hardware, load_hardware
from torchgpipe.plan.hardware.headroom import room
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.profiled import predictor_here
from torchgpipe.plan.reason import reason
from torchgpipe.plan.report import WIDTH, describe_numbers, describe_setup
from torchgpipe.plan.search.beside import DataParallel, data_parallel
from torchgpipe.plan.search.impossible import Impossible, hopeless
from torchgpipe.plan.search.search import Found, search
from torchgpipe.plan.search.trial import Candidate
from torchgpipe.skip import verify_skippables
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.tensors.microbatch import TensorOrTensors, check, tensors_of
from torchgpipe.trace.layer import flat

HERE = "here"
"""In place of a hardware description's name: profile on the present device."""


@dataclass(frozen=True)
class Plan:
    """The best setup that was found, with what is predicted for it, and the runners-up. `print` it to read it."""

    candidates: Sequence[Candidate]
    """The best for each number of partitions, the fastest first."""
    bound: float
    """Seconds that none of the setups that were asked for can beat."""
    memory: float
    """Bytes of each device."""
    room: float
    """What tensors may take of them."""
    hardware: Hardware
    source: str
    """What the seconds were predicted from."""
    by_devices: Mapping[int, Found] = field(repr=False)
    """For each number of devices: the best setup, and the seconds that none can beat."""
    beside: Sequence[DataParallel] = field(repr=False)
    """Data parallel training, on as many devices."""
    reason: str
    """What holds the plan back, in words."""
    module: nn.Sequential = field(repr=False)

    @property
    def balance(self) -> list[int]:
        """Layers per partition."""
        return list(self.candidates[0].setup.balance)

    @property
    def chunks(self) -> int:
        """Micro-batches per mini-batch."""
        return len(self.candidates[0].setup.sizes)

    @property
    def checkpoint(self) -> Mode:
        """Which micro-batches are recomputed."""
        return self.candidates[0].setup.checkpoint

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.candidates[0].seconds

    @property
    def gap(self) -> float:
        """By how much a faster setup could be faster at most: the seconds over those that none can beat, less one."""
        return self.seconds / self.bound - 1

    @property
    def bubble(self) -> float:
        """The predicted share of the devices' time in which they wait."""
        return self.candidates[0].bubble

    @property
    def peaks(self) -> list[float]:
        """The predicted peak of each device, in bytes allocated to tensors."""
        return [device.peak for device in self.candidates[0].devices]

    def gpipe(self, *, devices: Iterable[int | str | torch.device] | None = None) -> GPipe:
        """Return the `GPipe` that the plan describes; it moves the model's layers to the devices.

        Raises:
            ValueError: the model is on `meta`, so that there is nothing to move; or as `GPipe`.
        """
        given = None if devices is None else list(devices)
        elsewhere = given is None or any(torch.device(device).type != "meta" for device in given)
        if elsewhere and any(x.is_meta for x in (*self.module.parameters(), *self.module.buffers())):
            raise ValueError(
                "the model is on device 'meta' and has no values to move: build it on a real device, and give that "
                f"GPipe(model, {self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}); "
                "or give gpipe() devices that are 'meta', too"
            )
        return GPipe(self.module, self.balance, devices=given, chunks=self.chunks, checkpoint=self.checkpoint)

    def __str__(self) -> str:
        best = [(n, each.best) for n, each in self.by_devices.items()]
        batch_size = self.candidates[0].setup.batch_size
        parts = (
            describe_setup(self.candidates[0], self.bound, self.memory, self.room, self.source),
            describe_numbers(best, self.beside, batch_size, self.room),
            fill(self.reason, WIDTH),
        )
        return "\n\n".join(filter(None, parts))


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
            whose caching allocator reserves more than tensors take, and nothing on a CPU. See `headroom.py`.
        hardware: a description's name, such as "h100x8", its file, or itself; see `hardware_names`. By default "here":
            profile on the sample's device, and predict for devices like it. On a CPU a device has as many cores as
            PyTorch has threads, and an equal share of the memory.
        optimizer: one of "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" and "adamw", for its state and what
            its step makes, with PyTorch's defaults: on a GPU, all parameters are updated at once.
        chunks: the numbers of micro-batches to choose from, or the only one; by default all that differ.
        checkpoint: the modes to choose from, or the only one.
        autocast: the type of numbers that training's autocast has, such as `torch.bfloat16`; by default, that of the
            autocast that is enabled where `plan` is called.
        master_weights: whether the optimizer keeps a float32 copy of parameters in 16 bits.

    Raises:
        TypeError: a wrong type, or skips that do not match.
        ValueError: a value out of range, or no setup fits (`Impossible`); the message says why.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"only an nn.Sequential can be planned, got {type(module).__name__}")
    sample = flat(module, sample)
    check(sample)
    verify_skippables(module)
    node = None if hardware == HERE else hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    _check_number("batch_size", batch_size)
    if devices is None and node is not None:
        devices = node.devices
    if devices is not None:
        _check_number("devices", devices)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    modes = _several("checkpoint", checkpoint, "mode")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"checkpoint must be among {', '.join(map(repr, MODES))}, got {mode!r}")
    numbers = None if chunks is None else _several("chunks", chunks, "whole number")
    for m in numbers or ():
        if not isinstance(m, int) or isinstance(m, bool) or not 1 <= m <= batch_size:
            raise ValueError(f"chunks must be whole numbers from 1 to the batch size {batch_size}, got {m!r}")
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16 or torch.bfloat16, got {autocast!r}")
    if master_weights and any(p.element_size() != 2 for p in module.parameters() if p.requires_grad):
        raise ValueError("master_weights is for parameters in 16 bits: others are updated as they are, so leave it out")
    given = None if memory is None else parse_amount(memory)
    number = isinstance(headroom, (int, float)) and not isinstance(headroom, bool)
    if headroom is not None and not (number and 0 <= headroom < inf):
        raise ValueError(
            f"headroom must be a share of the tensors' bytes, from 0 on, such as 0.15 for 15 %; got {headroom!r}"
        )
    cpu = node.cpu if node is not None else tensors_of(sample)[0].device.type == "cpu"
    counts = count(module, sample, device="cpu" if cpu else "cuda", autocast=autocast)
    if node is None:
        with nullcontext() if autocast is None else torch.autocast("cpu" if cpu else "cuda", autocast):
            here = predictor_here(module, sample, counts, devices=devices, memory=given)
        predictor: Predictor = here
        node, source = here.hardware, f"{here.profile}; {here.hardware.sources['link_bandwidth']}"
    else:
        predictor, source = Predictor(counts, node), f"hardware description {node.name}"
    each = node.memory if given is None else given
    tensors = room(each, node, headroom)
    most = node.devices if devices is None else devices
    if most > node.devices:
        source += f", which has {node.devices} devices: more of them are taken to be linked alike"
    state = optimizer_named(optimizer, foreach=not node.cpu, master_weights=master_weights)
    if (way := hopeless(predictor, batch_size, most, tensors, state)) is not None:
        raise Impossible(way)
    found = search(
        predictor,
        batch_size=batch_size,
        memory=tensors,
        partitions=_numbers(min(most, len(counts))),
        optimizer=state,
        chunks=numbers,
        checkpoint=modes,
    )
    candidates = sorted((each.best for each in found.values() if each.best is not None), key=lambda c: c.seconds)
    bound = min(each.bound for each in found.values())
    beside = [data_parallel(predictor, batch_size, n, state) for n in found]
    words = reason(predictor, found, tensors, beside)
    return Plan(candidates, bound, each, tensors, node, source, found, beside, words, module)


def _numbers(most: int) -> list[int]:
    """Return the numbers of partitions to choose from: every one to 16, then fewer, and the most."""
    return sorted({n for n in (*range(1, 17), *(k << i for i in range(3, 12) for k in (2, 3))) if n <= most} | {most})


def _check_number(name: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {given!r}")


def _several(name: str, given: Any, what: str) -> list[Any]:
    """Return what was given as a list: one thing, or any sequence of them but an empty one."""
    if isinstance(given, (str, int)):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be one {what} or a sequence of them, got {given!r}")
    if not (found := list(given)):
        raise ValueError(f"{name} must name at least one {what}, got none: leave it out to choose from all")
    return found
