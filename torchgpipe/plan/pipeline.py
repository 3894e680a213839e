"""`pipeline`: any module as a planned `GPipe`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchgpipe.gpipe import GPipe
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.planner import HERE, plan
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.trace.sequential import Whole, sequential


def pipeline(
    module: nn.Module,
    sample: Any,
    *,
    devices: Iterable[int | str | torch.device],
    batch_size: int,
    memory: str | float | None = None,
    hardware: str | Path | Hardware = HERE,
    optimizer: str = "sgd",
    chunks: int | Sequence[int] | None = None,
    checkpoint: Mode | Sequence[Mode] = MODES,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
) -> GPipe:
    """Make a pipeline of any module: `sequential`, then `plan`, then `GPipe`.

        model = pipeline(torchvision.models.resnet50(), sample, devices=["cuda:0", "cuda:1"], batch_size=64)
        loss(model(input), target).backward()

    Args:
        module, sample, whole, shared: as for `torchgpipe.sequential`; the sample is as large as a large micro-batch.
        devices: the devices to use; the plan may need fewer.
        batch_size, memory, hardware, optimizer, chunks, checkpoint: as for `torchgpipe.plan.plan`.

    Raises:
        TypeError, ValueError: as `sequential`, `plan` and `GPipe` do.
    """
    given = [*devices]
    layers = sequential(module, sample, whole=whole, shared=shared)
    found = plan(
        layers,
        sample,
        batch_size=batch_size,
        devices=len(given),
        memory=memory,
        hardware=hardware,
        optimizer=optimizer,
        chunks=chunks,
        checkpoint=checkpoint,
    )
    return found.gpipe(devices=given)
