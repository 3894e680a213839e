"""The model, the mini-batches and the functions that test cases with PyTorch tools share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.works_with import Batches, train

from ...row import Row

Use = Callable[[Any, Any], Any]
Change = Callable[[Any], object]

# Tests over ranks run backward by `autograd.grad` on each rank (../../../everywhere.py).
ALONE: dict[str, Any] = {
    "without": {"ranks": "it needs one process with the whole model, and its backward"}
}


# Each of these cases takes a second or more: a process is started, or layers are compiled.
LONG = {
    "one micro-batch": "what runs does not depend on it",
    "observed": "what runs does not depend on it",
}


class Block(nn.Module):
    """A residual layer, whose inner linear layer is changed in some test cases.

    The class is at the top of a module, so that other processes can import it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def unchanged(_: Any) -> None:
    pass


def layers(change: Change = unchanged) -> nn.Sequential:
    """Build the model that these test cases share, and change it by `change`."""
    made = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))
    change(made)
    return made


def batches(rank: int = 0) -> Batches:
    """Return three mini-batches for a rank. Each rank gets different ones.

    A mini-batch has 10 samples, so the last of its four micro-batches is smaller than the others.
    """
    drawn: Batches = []
    for _ in range(3 * rank + 3):
        x, target = torch.randn(10, 6), torch.randn(10, 3)
        drawn.append((x, target))
    return drawn[-3:]


def then(change: Change) -> Use:
    """Return a function that trains a model, changes it by `change`, and trains it again.

    The function is the `use` of a test case.
    """

    def use(run: Any, batches: Batches) -> Any:
        losses = train(run, batches)
        run.zero_grad()
        change(run)
        return losses, train(run, batches)

    return use


def tool(name: str, use: Use = train, note: str = "", **options: Any) -> Row:
    """Return a test case for a PyTorch tool, with the model and mini-batches of this module.

    Args:
        name: The name of the test case.
        use: A function that uses the tool with a model and mini-batches.
        note: What users need to know about the tool.
        options: Fields of the test case that replace the usual ones.
    """
    given: dict[str, Any] = {"layers": layers, "given": batches, "balance": (2, 2), "chunks": 4}
    return Row(name, use=use, note=note, **given | options)


def changed(name: str, change: Change, note: str = "", **options: Any) -> Row:
    """Return a test case in which `change` changes the layers before the pipeline is built."""
    return tool(name, note=note, layers=partial(layers, change), **options)
