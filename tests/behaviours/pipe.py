"""`Training`, a behaviour that any pipeline may have, and `Pipe`, the interface to a pipeline; adapters subclass it.

Rows run on other projects' pipelines, too (benchmarks/others), so this imports torch only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Tensors = dict[str, Tensor | None]
Found = Mapping[str, Tensor | bool | None]
"""The visible results of a pipeline, or of a rank's part of it, by name: tensors, and whether a claim holds."""


class NotOffered(Exception):
    """Raised if a pipeline does not offer something."""


def batch(
    size: int = 8, seed: int = 0, *, features: int = 4, targets: int = 3
) -> tuple[Any, Tensor]:
    """Return a mini-batch, the same on all ranks."""
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(size, features, generator=draw), torch.randn(size, targets, generator=draw)


def mlp(*between: nn.Module) -> nn.Sequential:
    """Return four layers, with the given ones in the middle."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *between, nn.Linear(6, 6), nn.Linear(6, 3))


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squares over all samples, which is also the sum over micro-batches."""
    return ((output - target) ** 2).sum()


@dataclass(frozen=True, eq=False)
class Training:
    """A behaviour of training: by default, one step.

    After `action`, all results of the pipeline (or what `action` returns instead) must equal those of the plain layers,
    run on each micro-batch in turn.

    Args:
        layers: make the layers to train; with `sample`, any module, which is traced.
        balance: layers per partition; with `sample`, the first submodule of each partition but the first.
        criterion: the loss of output and target: a sum over samples, or with `mean` their mean.
        clip: the norm to which `Pipe.train` clips gradients.
        refused, tolerance: for this library's engines, as in row.py; `unlike` is the reason why they differ.
    """

    name: str
    group: str
    why: str
    layers: Callable[[], nn.Module] = mlp
    balance: Sequence[Any] = (2, 2)
    given: Callable[[], tuple[Any, Tensor]] = batch
    action: Callable[[Pipe], Pipe | Found] = lambda pipe: pipe.step()
    chunks: int = 4
    checkpoint: Any = "never"
    deferred_batch_norm: bool = False
    criterion: Callable[[Any, Any], Tensor] = squares
    mean: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    clip: float | None = None
    sample: Tensor | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    unlike: str = ""
    tolerance: float = 0.0

    @property
    def partitions(self) -> int:
        return len(self.balance) + (self.sample is not None)


class Pipe(ABC):
    """The pipeline of a row; on ranks, a rank's part. Adapters implement `build`; the rest suits any one module."""

    package = ""
    """The folder of its code: an error raised there, with a message, is a refusal."""
    ranks = False
    """Whether each partition is a process."""

    def __init__(self, row: Training, folder: Path) -> None:
        self.row, self.folder = row, folder
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        torch.manual_seed(0)
        self.module = self.build(row.layers(), [*row.balance])
        self.optimizer = None if row.optimizer is None else row.optimizer(self.module.parameters())

    @abstractmethod
    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        """Build the pipeline. Return a module with this rank's parameters under the names of the whole model."""

    def again(self, **changes: Any) -> Pipe:
        """Return a new pipeline of this row with changes."""
        return type(self)(replace(self.row, **changes), self.folder)

    def step(self, *given: Any) -> Pipe:
        """Run forward and backward of a mini-batch (default: the row's). Record the loss if this rank has it."""
        x, target = given or self.row.given()
        self.module.train()
        loss = self.loss(x, target)
        loss.backward()
        self.losses.append(loss.detach())
        return self

    def loss(self, x: Any, target: Any) -> Tensor:
        return self.row.criterion(self.call(x), target)

    def call(self, x: Any) -> Any:
        return self.module(x)

    def evaluate(self, *given: Any) -> Pipe:
        """Run forward in eval mode without gradients. Record the output if this rank has it."""
        self.module.eval()
        with torch.no_grad():
            output = self.call((given or self.row.given())[0])
        if output is not None:
            self.outputs.append(output)
        return self

    def train(self, *given: Any) -> Pipe:
        """Run a step, clip gradients, and step the optimizer."""
        self.step(*given)
        if self.row.clip is not None:
            self.clip_gradients(self.row.clip)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def clip_gradients(self, norm: float) -> None:
        """Clip the gradients of all ranks together."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def save(self) -> None:
        """Write files with the state of model and optimizer."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        torch.save((self.module.state_dict(), optimizer), self.folder / f"{rank()}.pt")
        if dist.is_initialized():
            dist.barrier()

    def load(self) -> None:
        """Load files that a pipeline of any balance saved; with an optimizer, of the same balance."""
        files = {path.stem: torch.load(path) for path in self.folder.glob("*.pt")}
        self.load_model({name: x for state, _ in files.values() for name, x in state.items()})
        if self.optimizer is not None:
            self.optimizer.load_state_dict(files[str(rank())][1])

    def load_model(self, whole: dict[str, Tensor]) -> None:
        """Load this rank's part of the state dict of the whole model."""
        self.module.load_state_dict(whole)

    def gradients(self) -> Tensors:
        """Return the gradients by the names of their parameters."""
        return {name: p.grad for name, p in self.module.named_parameters()}

    def found(self) -> Tensors:
        """Return all results: losses, outputs, gradients, parameters and buffers."""
        found: Tensors = {f"loss {k}": loss.detach() for k, loss in enumerate(self.losses)}
        for k, output in enumerate(self.outputs):
            parts = output if isinstance(output, tuple) else (output,)
            found |= {f"output {k}.{number}": part.detach() for number, part in enumerate(parts)}
        found |= {f"gradient of {name}": x for name, x in self.gradients().items()}
        return found | {name: x.detach().clone() for name, x in self.module.state_dict().items()}


def rank() -> int:
    """Return this process' rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def micro_batches(x: Any, m: int) -> list[Any]:
    """Split a tensor, or each tensor of a nested tuple, into at most m micro-batches."""
    return (
        list(zip(*(micro_batches(part, m) for part in x), strict=True))
        if isinstance(x, tuple)
        else [*x.chunk(m)]
    )
