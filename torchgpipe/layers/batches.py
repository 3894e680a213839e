"""Divide a mini-batch into micro-batches for the first stage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpipe.task.guards.memory import begins_in_place
from torchgpipe.task.stage import Stage
from torchgpipe.tensors.microbatch import TensorOrTensors, mapped, scatter, tensors_of


def divided(
    input: TensorOrTensors, chunks: int, stage: Stage, batched: Sequence[bool] | None
) -> list[TensorOrTensors]:
    """Return the micro-batches of a mini-batch, on the device of the first stage.

    Args:
        input: The mini-batch.
        chunks: The largest number of micro-batches.
        stage: The first stage.
        batched: Whether each tensor of the input has a batch dimension; `None` if all have one.
    """
    device = stage.device
    # A copy to the host must be waited for: the host could read it before it has arrived.
    input = mapped(lambda x: x.to(device, non_blocking=device.type == "cuda"), input)
    micro_batches = scatter(input, chunks, batched)
    one_tensor = len(micro_batches) > 1 and isinstance(input, Tensor)
    if one_tensor and begins_in_place(stage.partition):
        # Micro-batches are views of one tensor, and share its version counter. So a change of one
        # micro-batch in place looks like a change of all micro-batches.
        micro_batches = [mapped(torch.clone, x) for x in micro_batches]
    return micro_batches


def samples(micro_batch: TensorOrTensors, batched: Sequence[bool] | None) -> int:
    """Return how many samples a micro-batch has, or 1 if no tensor has a batch dimension.

    `batched` says whether each of its tensors has a batch dimension; `None` means that all have.
    """
    tensors = tensors_of(micro_batch)
    for x, split in zip(tensors, batched or [True] * len(tensors), strict=True):
        if split and x.dim():
            return len(x)
    return 1
