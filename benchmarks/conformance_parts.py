"""What the checks of `benchmarks.conformance` are made of: a table of checks, layers, and mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.conformance_engines import Found, Make, Pipeline

Body = Callable[[Make], Pipeline | Found]


class Check(NamedTuple):
    """One thing that a pipeline must get right.

    `run` makes pipelines and uses them. Everything that can then be seen of the one that it returns, or what else it
    returns, must be as of the plain layers: on a whole mini-batch, or `by_micro_batch` on each micro-batch in turn.
    """

    name: str
    group: str
    why: str
    run: Body
    ranks: int
    by_micro_batch: bool


class Checks(dict[str, Check]):
    """Checks by name."""

    def add(
        self, group: str, name: str, why: str, *, ranks: int = 2, by_micro_batch: bool = False
    ) -> Callable[[Body], Body]:
        """Return a decorator that adds a function."""

        def decorator(body: Body) -> Body:
            assert name not in self, name
            self[name] = Check(name, group, why, body, ranks, by_micro_batch)
            return body

        return decorator


def batch(size: int, seed: int = 0, *, features: int = 4, targets: int = 3) -> tuple[Tensor, Tensor]:
    """Return a mini-batch, alike on all ranks."""
    draw = torch.Generator().manual_seed(100 + seed)
    return torch.randn(size, features, generator=draw), torch.randn(size, targets, generator=draw)


def mlp(*between: nn.Module) -> nn.Sequential:
    """Return four layers, alike on all ranks, with others in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *between, nn.Linear(6, 6), nn.Linear(6, 3))


class Function(nn.Module):
    """A layer that is a function of its one input, which may be a tuple."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """Run the function."""
        return self.function(x)


class On(nn.Module):
    """Give one of several tensors to a layer, and hand on the others."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.index, self.layer = index, layer

    def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the layer."""
        return (*x[: self.index], self.layer(x[self.index]), *x[self.index + 1 :])


class Raises(nn.Module):
    """A layer that hands on its input, and raises once: in forward, or in backward."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or raise."""
        if self.phase == "forward":
            self.raise_once()
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda grad: self.raise_once() if self.phase == "backward" else None)
        return x

    def raise_once(self) -> None:
        """Raise, the first time."""
        self.phase = ""
        raise ValueError(ON_PURPOSE)


ON_PURPOSE = "on purpose"
