"""`Training`, a test case for any pipeline, and `Pipe`, the interface to a pipeline under test.

Pipelines of other projects run the same test cases, by subclasses of `Pipe` in benchmarks/others.
So that they can import this module, it depends on nothing but torch.
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
"""Maps the names of a pipeline's or rank's results to tensors, or to whether a claim is true."""


class NotOffered(Exception):
    """Raised if a test case needs a feature that the pipeline under test does not offer."""


def batch(
    size: int = 8, seed: int = 0, *, features: int = 4, targets: int = 3
) -> tuple[Any, Tensor]:
    """Return a random input and a random target, which are the same on all ranks."""
    draw = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(size, features, generator=draw)
    target = torch.randn(size, targets, generator=draw)
    return x, target


def mlp(*between: nn.Module) -> nn.Sequential:
    """Build a small model with the given layers in its middle."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *between, nn.Linear(6, 6), nn.Linear(6, 3))


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared errors.

    Errors are not averaged, so the loss of a mini-batch is the sum of the losses of its
    micro-batches.
    """
    return ((output - target) ** 2).sum()


@dataclass(frozen=True, eq=False)
class Training:
    """A test case: a use of a pipeline in training, by default a single training step.

    `action` uses the pipeline. Then all results of the pipeline must equal those of plain layers,
    that is, the same layers without a pipeline, run on one micro-batch after another. If `action`
    returns results, the test compares only these.

    Args:
        name: The name of the behaviour.
        group: The part of the table of benchmarks/conformance.py that shows the behaviour.
        why: Why the behaviour matters.
        layers: A function that builds the layers to train; with `sample`, any module.
        balance: The number of layers in each partition. With `sample`, the name of the first
            submodule of each partition but the first.
        given: A function that makes the mini-batch: the input and the target.
        action: A function that uses the pipeline.
        chunks: The number of micro-batches.
        checkpoint: The mode of checkpointing.
        deferred_batch_norm: Whether batch norms track the statistics of whole mini-batches.
        criterion: The loss of an output and a target.
        mean: Whether the loss is a mean over samples. Otherwise it is a sum.
        optimizer: A function that makes an optimizer for the given parameters.
        clip: The norm to which `Pipe.train` clips gradients.
        sample: An input of one micro-batch, which is used to trace the module.
        refused: The engines of this library that must raise an error, and patterns of the error.
        unlike: Why this library's results differ from plain layers, if they do.
        tolerance: The tolerance for this library, as in compare.py.
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
        count = len(self.balance)
        return count if self.sample is None else count + 1


class Pipe(ABC):
    """The interface between test cases and a pipeline under test.

    If the pipeline runs over several ranks, each rank has a `Pipe` with its own partition.

    A subclass implements `build`. The other methods work for a pipeline that is called like a
    module. For a different pipeline, the subclass overrides them.
    """

    package = ""
    """The folder of the pipeline's code. An error with a message that is raised there is a refusal.
    """
    ranks = False
    """Whether each partition runs in a separate process."""

    def __init__(self, row: Training, folder: Path) -> None:
        self.row, self.folder = row, folder
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        torch.manual_seed(0)
        self.module = self.build(row.layers(), [*row.balance])
        self.optimizer = None if row.optimizer is None else row.optimizer(self.module.parameters())

    @abstractmethod
    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        """Build the pipeline, and return a module that has this rank's parameters.

        The parameters must have the same names as in the whole model.
        """

    def again(self, **changes: Any) -> Pipe:
        """Make a new pipeline for the same test case, with some changes.

        Args:
            changes: New values for fields of the test case (`Training`).
        """
        return type(self)(replace(self.row, **changes), self.folder)

    def step(self, *given: Any) -> Pipe:
        """Run forward and backward, and record the loss.

        Args:
            given: An input and a target. By default, the mini-batch of the test case is used.
        """
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
        """Run forward in eval mode, and record the output on the rank that computes it."""
        x, _ = given or self.row.given()
        self.module.eval()
        with torch.no_grad():
            output = self.call(x)
        if output is not None:
            self.outputs.append(output)
        return self

    def train(self, *given: Any) -> Pipe:
        """Run a training step: forward, backward, clipping of gradients, and the optimizer."""
        self.step(*given)
        if self.row.clip is not None:
            self.clip_gradients(self.row.clip)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def clip_gradients(self, norm: float) -> None:
        """Scale down the gradients if their norm, taken over all ranks, is larger than `norm`."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def save(self) -> None:
        """Save the model and the optimizer, in one file for each rank."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        torch.save((self.module.state_dict(), optimizer), self.folder / f"{rank()}.pt")
        if dist.is_initialized():
            dist.barrier()

    def load(self) -> None:
        """Load the model and the optimizer that another pipeline of this test case has saved.

        With an optimizer, both pipelines need the same balance, as each rank saves its own state.
        """
        whole: dict[str, Tensor] = {}
        optimizers = {}
        for path in self.folder.glob("*.pt"):
            state, optimizers[path.stem] = torch.load(path)
            whole |= state
        self.load_model(whole)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizers[str(rank())])

    def load_model(self, whole: dict[str, Tensor]) -> None:
        """Load this rank's parameters and buffers from the state dict of the whole model."""
        self.module.load_state_dict(whole)

    def gradients(self) -> Tensors:
        """Return a dictionary from the names of parameters to their gradients."""
        return {name: p.grad for name, p in self.module.named_parameters()}

    def found(self) -> Tensors:
        """Return all results: losses, outputs, gradients, parameters and buffers, by name."""
        found: Tensors = {}
        for k, loss in enumerate(self.losses):
            found[f"loss {k}"] = loss.detach()
        for k, output in enumerate(self.outputs):
            parts = output if isinstance(output, tuple) else (output,)
            for number, part in enumerate(parts):
                found[f"output {k}.{number}"] = part.detach()
        for name, gradient in self.gradients().items():
            found[f"gradient of {name}"] = gradient
        for name, x in self.module.state_dict().items():
            found[name] = x.detach().clone()
        return found


def rank() -> int:
    """Return the rank of this process, or 0 without ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def micro_batches(x: Any, m: int) -> list[Any]:
    """Split a tensor, or a nested tuple of tensors, into a list of at most `m` micro-batches."""
    if not isinstance(x, tuple):
        return [*x.chunk(m)]
    columns = [micro_batches(part, m) for part in x]
    return list(zip(*columns, strict=True))
