"""Divide a mini-batch into micro-batches for the first stage."""

import torch
from torch import Tensor

from torchgpipe.task.guards.memory import begins_in_place
from torchgpipe.task.stage import Stage
from torchgpipe.tensors.microbatch import TensorOrTensors, mapped, scatter, tensors_of
from torchgpipe.trace.signature import Signature


def divided(
    input: TensorOrTensors, chunks: int, stage: Stage, signature: Signature | None
) -> list[TensorOrTensors]:
    """Return the micro-batches of a mini-batch, on the device of the first stage.

    Args:
        input: The mini-batch.
        chunks: The largest number of micro-batches.
        stage: The first stage.
        signature: The signature of a traced module: it says which tensors have a batch dimension.
    """
    device = stage.device
    # A copy to the host must be waited for: the host could read it before it has arrived.
    input = mapped(lambda x: x.to(device, non_blocking=device.type == "cuda"), input)
    micro_batches = scatter(input, chunks, None if signature is None else signature.batched)
    one_tensor = len(micro_batches) > 1 and isinstance(input, Tensor)
    if one_tensor and begins_in_place(stage.partition):
        # Micro-batches are views of one tensor, and share its version counter. If a layer changed
        # one of them in place, this would look like a change of all. So clone them.
        micro_batches = [mapped(torch.clone, x) for x in micro_batches]
    return micro_batches


def samples(micro_batch: TensorOrTensors, signature: Signature | None) -> int:
    """Return how many samples a micro-batch has, or 1 if no tensor has a batch dimension."""
    tensors = tensors_of(micro_batch)
    batched = [True] * len(tensors) if signature is None else signature.batched
    for x, split in zip(tensors, batched, strict=True):
        if split and x.dim():
            return len(x)
    return 1
