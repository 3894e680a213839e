"""Engines: different ways to run the partitions of a pipeline in parallel. All do the same work.

- `threads`: `GPipe`, a thread for each partition of this process;
- `ranks`: `DistributedGPipe`, a process for each;
- `ScheduleGPipe` and `Schedule1F1B`: PyTorch's own schedules of `torch.distributed.pipelining`, a process for each.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.experiments.row import COMPONENTS, Row
from reproduce.machine.devices import Devices
from reproduce.models.built import SizedModel
from reproduce.records.record import TORCH_ENGINES, Engine
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.skip.layout import skip_layout
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.microbatch import tensors_of
from torchgpipe.trace.layer import flat

FEW = "it needs at least as many micro-batches as partitions"  # Schedule1F1B
FIRST = 2  # steps to compare: one before and one after an update; later, rounding errors add up
ROUNDING = 1e-4  # relative tolerance: processes round a convolution's gradient differently
Made = tuple[nn.Module, Callable[[], "Tensor | None"]]
"""The module whose parameters to optimize, and a function that runs forward and backward and returns the loss."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training to run: layers, pipeline settings, a mini-batch, and a function that makes an optimizer.

    `loss(output, target)` is a mean over samples.
    """

    layers: nn.Sequential
    balance: Sequence[int]
    chunks: int
    input: Any
    target: Any
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    checkpoint: Mode = "never"
    deferred_batch_norm: bool = False
    schedule: str = ""  # of `step`, on ranks; without one they go by `loss` and its `backward`


class Trainer:
    """Train some work on an engine, a step at a time. With an engine of processes, each process makes a `Trainer`.

    `steps` were done so far. `pipeline` is what a timeline can be recorded of; `None` for PyTorch's schedules.
    """

    def __init__(self, engine: Engine, work: Work) -> None:
        make = _scheduled if engine in TORCH_ENGINES else _pipeline
        module, self._forward_and_backward = make(engine, work)
        self.pipeline = module if isinstance(module, GPipe | DistributedGPipe) else None
        self.steps = 0
        # Optimizers raise if there are no parameters.
        self._optimizers = (
            [work.optimizer(module)] if any(True for _ in module.parameters()) else []
        )

    def step(self) -> float | None:
        """Do one training step; return its loss, or `None` if this process does not have it."""
        self.steps += 1
        loss = self._forward_and_backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return None if loss is None else float(loss)


def _pipeline(engine: Engine, work: Work) -> Made:
    settings: dict[str, Any] = {
        name: getattr(work, name) for name in ("chunks", "checkpoint", "deferred_batch_norm")
    }
    loss, x, target = (
        work.loss,
        work.input,
        work.target,
    )  # `run` must not keep `work`: it has all ranks' layers
    model: GPipe | DistributedGPipe
    if engine == "threads":
        model = GPipe(work.layers, work.balance, devices=["cpu"] * len(work.balance), **settings)
    else:
        model = DistributedGPipe(
            work.layers, work.balance, schedule=work.schedule or "GPipe", **settings
        )
        x = x if model.rank == 0 else None
    by_steps = bool(work.schedule)

    def run() -> Tensor:
        value = (model.step if by_steps else model.loss)(loss, x, target)
        if not by_steps:
            value.backward()
        return value.detach()

    return model, run


def _scheduled(engine: Engine, work: Work) -> Made:
    from reproduce.run.engines.schedules import schedule  # imported only when needed: it takes long

    rank, n = dist.get_rank(), len(work.balance)
    first, end = [*pairwise([0, *accumulate(work.balance)])][rank]
    part, recomputed = work.layers[first:end], checkpointed(work.checkpoint, work.chunks)
    made = schedule(engine, part, chunks=work.chunks, checkpointed=recomputed, loss_fn=work.loss)
    inputs = [*tensors_of(flat(work.layers, work.input))] if rank == 0 else []
    losses: list[Tensor] = []
    more = {"target": work.target, "losses": losses} if rank + 1 == n else {}

    def run() -> Tensor | None:
        try:
            made.step(*inputs, **more)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # the layer's own error, without the stage's
        # The schedule divides gradients by the number of micro-batches, so they belong to this mean.
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return part, run


def check_same(losses: Sequence[float | None], others: Sequence[float | None], what: str) -> None:
    """Raise `Error` if losses on two engines differ by more than rounding, in the first steps that both have done.

    Then the engines do different work, and their times are not comparable.
    """
    count = min(len(losses), len(others), FIRST)
    ours, theirs = (torch.tensor(each[:count], dtype=torch.float64) for each in (losses, others))
    if not torch.allclose(ours, theirs, rtol=ROUNDING, atol=0, equal_nan=True):
        raise Error(
            f"{what}: the losses are {losses[:count]}, but {others[:count]} on another engine"
        )


def why_not(engine: Engine, row: Row, devices: Devices) -> str | None:
    """Return why an engine cannot run a row; `None` if it can."""
    partitions, chunks, theirs = row.partitions or 0, row.chunks or 1, engine in TORCH_ENGINES
    against = {
        "there is no pipeline": row.partitions is None,
        "there is one partition only": partitions == 1,
        "processes are measured on CPUs only": devices.kind != "cpu",
        "only GPipe can do without a component": row.components != COMPONENTS,
        "PyTorch's schedules know no deferred batch norm": theirs and row.deferred_batch_norm,
        "PyTorch's schedules need micro-batches of equal size": theirs and row.batch_size % chunks,
        FEW: engine == "Schedule1F1B" and chunks < partitions,
        "PyTorch's schedules know no skips": theirs and partitions > 1 and _has_skips(row.sized),
    }
    return (
        None
        if engine == "threads"
        else next((reason for reason, holds in against.items() if holds), None)
    )


@functools.cache
def _has_skips(model: SizedModel) -> bool:
    with torch.device("meta"):
        return bool(skip_layout(model.layers()))
