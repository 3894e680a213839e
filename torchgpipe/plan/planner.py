"""`plan`: choose balance, micro-batches and checkpointing for a model, by prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from torchgpipe.balance.minimise import check_partitions
from torchgpipe.checkpoint import MODES as CHECKPOINTS
from torchgpipe.checkpoint import Mode
from torchgpipe.gpipe import GPipe
from torchgpipe.microbatch import TensorOrTensors, check
from torchgpipe.plan.count import count
from torchgpipe.plan.hardware import Hardware, load_hardware
from torchgpipe.plan.predict import OPTIMIZERS, Predictor
from torchgpipe.plan.report import describe, parse_amount
from torchgpipe.plan.search import MODES, Candidate, search
from torchgpipe.skip import verify_skippables

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """The best setup that was found, with what is predicted for it, and the runners-up. `print` it to read it."""

    candidates: Sequence[Candidate]
    memory: float
    hardware: Hardware
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
    def bubble(self) -> float:
        """The predicted share of the devices' time in which they wait."""
        return self.candidates[0].bubble

    @property
    def peaks(self) -> list[float]:
        """The predicted peak of each device, in bytes allocated to tensors."""
        return [device.peak for device in self.candidates[0].devices]

    def gpipe(self, *, devices: Iterable[int | str | torch.device] | None = None) -> GPipe:
        """Return the `GPipe` that the plan describes; it moves the model's layers to the devices."""
        return GPipe(
            self.module, self.balance, devices=devices, chunks=self.chunks, checkpoint=self.checkpoint
        )

    def __str__(self) -> str:
        return describe(self.candidates, self.memory, f"hardware description {self.hardware.name}")


def plan(
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    batch_size: int,
    devices: int | None = None,
    memory: str | float | None = None,
    hardware: str | Path | Hardware,
    optimizer: str = "sgd",
    chunks: Sequence[int] | None = None,
    checkpoint: Sequence[Mode] = MODES,
) -> Plan:
    """Plan a pipeline for `module`, without running it.

    The layers are counted on the `meta` device, so neither a GPU nor memory for the model is needed.

    Args:
        module: the layers, on any device, `meta` too.
        sample: an input like those to come, a tensor or a tuple of tensors; its batch size does not matter.
        batch_size: samples of a mini-batch.
        devices: how many there are at most; by default the node's.
        memory: what each has for tensors, in bytes or as text such as "24GiB"; by default the node's.
        hardware: a description's name, such as "h100x8", its file, or itself; see `hardware_names`.
        optimizer: one of "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" and "adamw", for its state.
        chunks: the numbers of micro-batches to choose from; by default about two for each doubling.
        checkpoint: the modes to choose from.

    Raises:
        TypeError: a wrong type, or skips that do not match.
        ValueError: a value out of range, or no setup fits (`Impossible`); the message says why.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"only an nn.Sequential can be planned, got {type(module).__name__}")
    check(sample)
    verify_skippables(module)
    node = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    devices = node.devices if devices is None else devices
    check_partitions(min(devices, len(module)) if isinstance(devices, int) else devices, len(module))
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    for mode in checkpoint:
        if mode not in CHECKPOINTS:
            raise ValueError(f"checkpoint must be among {', '.join(map(repr, CHECKPOINTS))}, got {mode!r}")
    for m in chunks or ():
        if not isinstance(m, int) or not 1 <= m <= batch_size:
            raise ValueError(f"chunks must be whole numbers from 1 to the batch size {batch_size}, got {m!r}")
    room = (node.memory if memory is None else parse_amount(memory)) - node.workspace
    candidates = search(
        Predictor(count(module, sample), node),
        batch_size=batch_size,
        devices=devices,
        memory=room,
        state=OPTIMIZERS[optimizer],
        chunks=chunks,
        checkpoint=checkpoint,
    )
    return Plan(candidates, room, node, module)
