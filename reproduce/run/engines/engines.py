"""Define engines: different ways to run the partitions of a pipeline in parallel.

All engines can run the same training, so their times can be compared:

- `threads`: `GPipe`, with a thread of this process for each partition;
- `ranks`: `DistributedGPipe`, with a process for each partition;
- `ScheduleGPipe` and `Schedule1F1B`: PyTorch's own schedules in `torch.distributed.pipelining`,
  with a process for each partition.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from reproduce.error import Error
from reproduce.experiments.row import COMPONENTS, PUBLISHED_BALANCE, Row
from reproduce.machine.devices import Devices
from reproduce.models.built import SizedModel
from reproduce.records.record import TORCH_ENGINES, Engine
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.skip.layout import skip_layout
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.microbatch import tensors_of
from torchgpipe.trace.sequential import flat

ONLY_EMULATED = "rows with the published balance are only emulated"
FEW = "it needs at least as many micro-batches as partitions"
"""Why `Schedule1F1B` cannot run a row that has fewer micro-batches."""
FIRST = 2
"""How many steps have their losses compared. In later steps, rounding errors have added up."""
ROUNDING = 1e-4
"""The relative difference of losses that is accepted as a rounding error.

Processes round the gradient of a convolution differently.
"""
Losses = Sequence[float | None]
Made = tuple[nn.Module, Callable[[], "Tensor | None"]]
"""The module whose parameters to optimize, and a function that runs forward and backward.

The function returns the loss, or `None` if this process does not have it.
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A training that any engine can run: a model, a mini-batch, a loss and an optimizer.

    Attributes:
        layers: The model.
        balance: The number of layers of each partition.
        chunks: The number of micro-batches.
        input: The input mini-batch.
        target: The target of the mini-batch.
        loss: A function. `loss(output, target)` returns the mean loss over the samples.
        optimizer: A function. `optimizer(module)` makes an optimizer of the module's parameters.
        checkpoint: Which micro-batches are checkpointed: `GPipe`'s argument of the same name.
        deferred_batch_norm: Whether the running statistics of batch norm are updated once for each
            mini-batch instead of once for each micro-batch.
    """

    layers: nn.Sequential
    balance: Sequence[int]
    chunks: int
    input: Any
    target: Any
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    checkpoint: Mode = "never"
    deferred_batch_norm: bool = False


class Trainer:
    """Runs training steps with an engine, which runs the partitions of a pipeline in parallel.

    If the engine uses processes, each process creates a `Trainer`.

    Attributes:
        steps: The number of steps so far.
        pipeline: The `GPipe` or `DistributedGPipe`. It is `None` with a schedule of PyTorch.
    """

    def __init__(self, engine: Engine, work: Work) -> None:
        make = _scheduled if engine in TORCH_ENGINES else _pipeline
        module, self._forward_and_backward = make(engine, work)
        self.pipeline = module if isinstance(module, GPipe | DistributedGPipe) else None
        self.steps = 0
        self._optimizers: list[Optimizer] = []
        if list(module.parameters()):  # optimizers raise if there are no parameters
            self._optimizers.append(work.optimizer(module))

    def step(self) -> float | None:
        """Run one training step; return the loss, or `None` if another process has the loss."""
        self.steps += 1
        loss = self._forward_and_backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return None if loss is None else float(loss)


def _pipeline(engine: Engine, work: Work) -> Made:
    layers, balance = work.layers, work.balance
    settings: dict[str, Any] = {
        "chunks": work.chunks,
        "checkpoint": work.checkpoint,
        "deferred_batch_norm": work.deferred_batch_norm,
    }
    # The functions below must not keep `work` alive, because it contains the layers of all ranks.
    loss, x, target = work.loss, work.input, work.target
    model: GPipe | DistributedGPipe
    if engine == "threads":
        model = GPipe(layers, balance, devices=["cpu"] * len(balance), **settings)
    else:
        model = DistributedGPipe(layers, balance, **settings)
        if model.rank > 0:
            x = None

    def run() -> Tensor:
        value = model.loss(loss, x, target)
        value.backward()
        return value.detach()

    return model, run


def _scheduled(engine: Engine, work: Work) -> Made:
    from reproduce.run.engines.schedules import schedule  # only here, because the import is slow

    rank = dist.get_rank()
    ends = list(accumulate(work.balance))
    end = ends[rank]
    part = work.layers[end - work.balance[rank] : end]
    recomputed = checkpointed(work.checkpoint, work.chunks)
    made = schedule(engine, part, chunks=work.chunks, checkpointed=recomputed, loss_fn=work.loss)
    inputs: list[Tensor] = []
    if rank == 0:
        inputs.extend(tensors_of(flat(work.layers, work.input)))
    losses: list[Tensor] = []
    is_last = rank + 1 == len(work.balance)
    more = {"target": work.target, "losses": losses} if is_last else {}

    def run() -> Tensor | None:
        try:
            made.step(*inputs, **more)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # the layer's own error
        if not losses:
            return None
        # Return the mean of the losses of all micro-batches. The gradients are those of this mean,
        # because the schedule has divided them by the number of micro-batches.
        return torch.stack([loss.detach() for loss in losses]).mean()

    return part, run


def check_same(losses: Losses, others: Losses, what: str) -> None:
    """Raise `Error` if two engines computed different losses, apart from rounding errors.

    Different losses show that the engines do different work, so that their times cannot be
    compared. Only the first two steps are checked, or fewer if an engine has not yet run two steps.

    Args:
        losses: The loss of each step with one engine.
        others: The loss of each step of the same training with another engine.
        what: The name of the training and the engine, for the error message.
    """
    count = min(len(losses), len(others), FIRST)
    losses, others = losses[:count], others[:count]
    ours = torch.tensor(losses, dtype=torch.float64)
    theirs = torch.tensor(others, dtype=torch.float64)
    if not torch.allclose(ours, theirs, rtol=ROUNDING, atol=0, equal_nan=True):
        raise Error(f"{what}: the losses are {losses}, but {others} on another engine")


def why_not(engine: Engine, row: Row, devices: Devices) -> str | None:
    """Return why an engine (such as `ranks`) cannot run a row; `None` if it can run the row."""
    if row.configuration == PUBLISHED_BALANCE:
        return ONLY_EMULATED
    if engine == "threads":
        return None
    reasons = _against_processes(row, devices)
    if engine in TORCH_ENGINES:
        reasons = chain(reasons, _against_schedule(engine, row))
    return next(reasons, None)


def _against_processes(row: Row, devices: Devices) -> Iterator[str]:
    """Yield the reasons why an engine with a process for each partition cannot run a row."""
    if row.partitions is None:
        yield "there is no pipeline"
    if row.partitions == 1:
        yield "there is one partition only"
    if devices.kind != "cpu":
        yield "processes are measured on CPUs only"
    if row.components != COMPONENTS:
        yield "only GPipe can do without a component"


def _against_schedule(engine: Engine, row: Row) -> Iterator[str]:
    """Yield the reasons why `engine`, a schedule of PyTorch, cannot run a row (configuration)."""
    chunks = row.chunks or 1
    if row.deferred_batch_norm:
        yield "PyTorch's schedules know no deferred batch norm"
    if row.batch_size % chunks:
        yield "PyTorch's schedules need micro-batches of equal size"
    if engine == "Schedule1F1B" and chunks < row.devices:
        yield FEW
    if _has_skips(row.sized):
        yield "PyTorch's schedules know no skips"


@functools.cache
def _has_skips(model: SizedModel) -> bool:
    with torch.device("meta"):
        return bool(skip_layout(model.layers()))
