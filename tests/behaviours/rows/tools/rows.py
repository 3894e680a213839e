"""The model, the mini-batches and the rows that all tools have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.works_with import Batches, train

from ...row import Row

Use = Callable[[Any, Any], Any]
Change = Callable[[Any], object]

# Tests over ranks go backward by `autograd.grad` on each rank (../../../everywhere.py).
ALONE: dict[str, Any] = {
    "without": {"ranks": "it needs one process with the whole model, and its backward"}
}


class Block(nn.Module):
    """A layer with something inside that tools change. Other processes find its class by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def unchanged(_: Any) -> None:
    pass


def layers(change: Change = unchanged) -> nn.Sequential:
    """Return the model, changed before it becomes a pipeline."""
    made = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))
    change(made)
    return made


def batches(rank: int = 0) -> Batches:
    """Return three mini-batches of a rank's own. Of four micro-batches, the last one is smaller."""
    drawn: Batches = []
    for _ in range(3 * rank + 3):
        x, target = torch.randn(10, 6), torch.randn(10, 3)
        drawn.append((x, target))
    return drawn[-3:]


def then(change: Change) -> Use:
    """Return a use: train, change the pipeline, and train it on."""

    def use(run: Any, batches: Batches) -> Any:
        losses = train(run, batches)
        run.zero_grad()
        change(run)
        return losses, train(run, batches)

    return use


def tool(name: str, use: Use = train, note: str = "", **options: Any) -> Row:
    """Return a row of the usual model and mini-batches."""
    given: dict[str, Any] = {"layers": layers, "given": batches, "balance": (2, 2), "chunks": 4}
    return Row(name, use=use, note=note, **given | options)


def changed(name: str, change: Change, note: str = "", **options: Any) -> Row:
    """Return a row whose layers are changed before they become a pipeline."""
    return tool(name, note=note, layers=partial(layers, change), **options)


def but_graph_never(message: str) -> dict[str, str]:
    """Return a refusal wherever tasks have graphs of their own."""
    return dict.fromkeys(("workers", "ranks", "always", "except_last"), message)
