"""Build PyTorch's own pipeline schedules, which are in `torch.distributed.pipelining`.

Import this module only where it is needed: the import of `torch.distributed.pipelining` takes more
than a second.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint


def schedule(
    name: str, part: nn.Module, *, chunks: int, checkpointed: int = 0, **options: Any
) -> Any:
    """Return a pipeline schedule of PyTorch for this rank's layers.

    Args:
        name: The class of the schedule, such as "Schedule1F1B".
        part: The layers of this rank.
        chunks: The number of micro-batches.
        checkpointed: How many of the first micro-batches are checkpointed. This is done with
            `torch.utils.checkpoint`, because PyTorch's schedules have no option for it.
        options: Further arguments of the schedule.
    """
    stage = _Stage(_Part(part), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    stage.checkpointed = checkpointed
    return getattr(pipelining, name)(stage, chunks, **options)


class _Stage(pipelining.PipelineStage):
    checkpointed = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.submod, _Part)
        self.submod.checkpoints = fwd_chunk_id < self.checkpointed
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class _Part(nn.Module):
    """A module that takes several tensors as separate arguments, and passes them on as one tuple.

    PyTorch's `PipelineStage` passes tensors as separate arguments, but the layers of a rank take a
    tuple of tensors as one argument.
    """

    checkpoints = False

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *tensors: Tensor) -> Any:
        x = tensors if len(tensors) > 1 else tensors[0]
        if self.checkpoints:
            return checkpoint(self.part, x, use_reentrant=False)
        return self.part(x)
