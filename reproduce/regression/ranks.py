"""Run a training step of a small pipeline over ranks: processes that exchange tensors over gloo."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from reproduce.run.engines.ranks import Ranks

N, M = 2, 8
"""The numbers of ranks and of micro-batches."""
_STEPS: list[Callable[[], float]] = []
"""In a process that is a rank: the function that runs a step, once it is made."""


def over_ranks(schedule: str) -> Callable[[], float]:
    """Start the ranks (processes) of a pipeline; return a function that runs a training step.

    The returned function returns the loss. The layers compute next to nothing, so that the time of
    a step is mostly the overhead of the pipeline. Call `over_ranks` before this process starts
    threads, because it forks.

    Args:
        schedule: The schedule of the pipeline, such as "1F1B".
    """
    ranks = Ranks(N)
    ranks.run(_make, schedule)
    return lambda: ranks.run(_step)[0]


def _make(_: object, schedule: str) -> None:
    """Make the pipeline, as one rank."""
    from torchgpipe.distributed import DistributedGPipe

    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(N)])
    model: Any = DistributedGPipe(layers, [1] * N, chunks=M, checkpoint="never", schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(2, M, 8)

    def step() -> float:
        loss = float(model.step(F.mse_loss, x, target))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    _STEPS.append(step)


def _step(_: object) -> float:
    return _STEPS[-1]()
