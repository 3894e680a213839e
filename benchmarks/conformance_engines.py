"""What the pipelines that `benchmarks.conformance` compares have in common, the plain layers, and this library's.

Each is used as its documentation says, with the options that it has for what a check needs. What it has no way to do
raises `NotOffered`. Those of others are in conformance_theirs.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe

PATIENCE = timedelta(seconds=12)  # of all process groups, for one operation

Tensors = dict[str, Tensor | None]
Found = Mapping[str, Tensor | bool | None]
"""What can be seen of a pipeline, or a rank's part of it, by name; and what is so of it, or not."""


class NotOffered(Exception):
    """Say that an engine has no way to do something."""


class Make(NamedTuple):
    """Makes the pipelines of a check, each by `make(layers, balance, ...)`; `folder` is one that all ranks see."""

    engine: Callable[..., Pipeline]
    folder: Path

    def __call__(self, layers: nn.Module, balance: list[Any], **options: Any) -> Pipeline:
        """Make a pipeline."""
        return self.engine(layers, balance, **options)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squares over all samples, which is also the sum over micro-batches."""
    return ((output - target) ** 2).sum()


class Pipeline(ABC):
    """A pipeline of layers; on each rank, its part.

    Args:
        layers: what is trained; with `sample`, a module as it is written.
        balance: layers per partition; of a module that is not a sequence, the names of submodules that later
            partitions begin with.
        criterion: of output and target; a sum over samples, or their `mean`.
        optimizer: makes one of parameters, for `train`.
        clip: the norm to which `train` clips gradients.
    """

    package: ClassVar[str]
    """The folder of the code that refuses what the engine cannot do."""
    ranks: ClassVar[bool] = True

    def __init__(
        self,
        layers: nn.Module,
        balance: list[Any],
        *,
        chunks: int = 4,
        checkpoint: Any = "never",
        deferred_batch_norm: bool = False,
        criterion: Callable[[Any, Any], Tensor] = squares,
        mean: bool = False,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        clip: float | None = None,
        sample: Tensor | None = None,
    ) -> None:
        self.chunks, self.checkpoint, self.deferred_batch_norm = chunks, checkpoint, deferred_batch_norm
        self.criterion, self.mean, self.clip, self.sample = criterion, mean, clip, sample
        self.make_optimizer = optimizer
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        self.module = self.build(layers, balance)
        self.optimizer = None if optimizer is None else optimizer(self.module.parameters())

    @abstractmethod
    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        """Make the pipeline; return what has this rank's parameters, under the names of the whole model."""

    @abstractmethod
    def step(self, x: Any, target: Any) -> None:
        """Run forward and backward of a mini-batch; append its loss to `losses` where it is known."""

    @abstractmethod
    def evaluate(self, x: Any, target: Any) -> None:
        """Run forward in evaluation mode without gradients; append the output to `outputs` where it is known."""

    def train(self, x: Any, target: Any) -> None:
        """Run a step, clip gradients, and step the optimizer."""
        self.step(x, target)
        if self.clip is not None:
            self.clip_gradients(self.clip)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip_gradients(self, norm: float) -> None:
        """Clip the gradients of all ranks together."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def save(self, folder: Path) -> None:
        """Write files with the state of model and optimizer."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        torch.save((self.module.state_dict(), optimizer), folder / f"{rank()}.pt")
        meet()

    def load(self, folder: Path) -> None:
        """Read the files that a pipeline of any balance wrote; the optimizer's, if it has one, of its own balance."""
        files = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
        whole = {name: x for state, _ in files.values() for name, x in state.items()}
        self.load_model(whole)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(files[str(rank())][1])

    def load_model(self, whole: dict[str, Tensor]) -> None:
        """Load this rank's part of a state of the whole model."""
        self.module.load_state_dict(whole)

    def gradients(self) -> Tensors:
        """Return the gradients by the names of their parameters."""
        return {name: p.grad for name, p in self.module.named_parameters()}

    def found(self) -> Tensors:
        """Return everything that can be seen: losses, outputs, gradients, parameters and buffers."""
        found: Tensors = {f"loss {k}": loss.detach() for k, loss in enumerate(self.losses)}
        for k, output in enumerate(self.outputs):
            parts = output if isinstance(output, tuple) else (output,)
            found |= {f"output {k}.{number}": part.detach() for number, part in enumerate(parts)}
        found |= {f"gradient of {name}": x for name, x in self.gradients().items()}
        return found | {name: x.clone() for name, x in self.module.state_dict().items()}


class Plain(Pipeline):
    """The layers without a pipeline, on a whole mini-batch; with `by_micro_batch`, on each micro-batch in turn."""

    ranks = False

    def __init__(self, *args: Any, by_micro_batch: bool = False, **options: Any) -> None:
        self.by_micro_batch = by_micro_batch
        super().__init__(*args, **options)

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        module: nn.Module = layers
        return module

    def step(self, x: Any, target: Any) -> None:
        self.module.train()
        m = self.chunks if self.by_micro_batch else 1
        parts = list(zip(micro_batches(x, m), micro_batches(target, m), strict=True))
        loss = torch.stack([self.criterion(self.module(x), target) for x, target in parts]).sum()
        loss.backward()
        self.losses.append(loss)

    def evaluate(self, x: Any, target: Any) -> None:
        self.module.eval()
        with torch.no_grad():
            self.outputs.append(self.module(x))


class Threads(Plain):
    """`GPipe` with a thread for each partition."""

    package = "torchgpipe"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        layers, balance = as_layers(layers, balance, self.sample)
        return GPipe(layers, balance, devices=["cpu"] * len(balance), chunks=self.chunks, checkpoint=self.checkpoint,
                     deferred_batch_norm=self.deferred_batch_norm, engine="workers")  # fmt: skip


class Ranks(Pipeline):
    """`DistributedGPipe`."""

    package = "torchgpipe"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        layers, balance = as_layers(layers, balance, self.sample)
        self.pipeline = DistributedGPipe(layers, balance, chunks=self.chunks, checkpoint=self.checkpoint,
                                         deferred_batch_norm=self.deferred_batch_norm)  # fmt: skip
        return self.pipeline

    def step(self, x: Any, target: Any) -> None:
        self.pipeline.train()
        loss = self.pipeline.loss(self.criterion, x, target)
        loss.backward()
        self.losses.append(loss)

    def evaluate(self, x: Any, target: Any) -> None:
        self.pipeline.eval()
        with torch.no_grad():
            output = self.pipeline(x)
        if output is not None:
            self.outputs.append(output)

    def clip_gradients(self, norm: float) -> None:
        self.pipeline.clip_grad_norm_(norm)


def join(number: int, ranks: int, folder: Path) -> None:
    """Let this process meet the other ranks."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks, timeout=PATIENCE)


def rank() -> int:
    """Return this process' rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def meet() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def micro_batches(x: Any, m: int) -> list[Any]:
    """Return at most m parts of a tensor, or of a tuple of tensors."""
    return list(zip(*(micro_batches(part, m) for part in x), strict=True)) if isinstance(x, tuple) else [*x.chunk(m)]


def slice_of(balance: list[int], j: int) -> slice:
    """Return where the layers of partition j are."""
    return slice(sum(balance[:j]), sum(balance[: j + 1]))


def as_layers(layers: Any, balance: list[Any], sample: Tensor | None) -> tuple[Any, list[int]]:
    """Return a sequence of layers and a balance, also of a module that is not a sequence."""
    if sample is None:
        return layers, balance
    traced, n = sequential(layers, sample), len(balance) + 1
    return traced, [len(traced) * (j + 1) // n - len(traced) * j // n for j in range(n)]
