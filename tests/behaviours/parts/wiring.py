"""Connections between layers: tuples, of which a layer uses the first tensor, and skips."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import pop, skippable, stash

Stashes = Mapping[str, Callable[[Tensor, Tensor], Tensor | None]]
Pops = Mapping[str, Callable[[Tensor, Tensor], Any]]


def merge(value: Any, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Add up tensors of any shapes and types: each but the first is reduced to its mean per sample."""
    total, *others = (value,) if isinstance(value, Tensor) else value
    for x in others:
        total = add(total, x.to(total.dtype).reshape(len(x), -1).mean(1, keepdim=True))
    return total


# What a layer with input x and output y stashes; how a layer combines its output y with a popped skip.
STASHES: Stashes = {
    "product": lambda x, y: 2 * x,
    "input": lambda x, y: x,
    "output": lambda x, y: y,
    "view of its input": lambda x, y: x.view_as(x),
    "half of its output": lambda x, y: y[:, :2],
    "detached": lambda x, y: y.detach(),
    "integers": lambda x, y: torch.arange(len(x), device=x.device),
    "nothing": lambda x, y: None,
}
POPS: Pops = {
    "add": lambda y, skip: merge((y, skip), Tensor.add),
    "add in place": lambda y, skip: merge((y, skip), Tensor.add_),
    "return both": lambda y, skip: (y, skip),
    "return it": lambda y, skip: skip if skip.shape == y.shape else y,
    "drop": lambda y, skip: y,
}


class OnFirst(nn.Module):
    """Run a layer on the first tensor of a tuple, and return the others unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, ...]) -> Any:
        return _with_first(value, self.layer(value[0]))


def with_skips(layer: nn.Module, stashes: Stashes, pops: Pops) -> Any:
    """Make a layer stash and pop skips: for each name, a function from `STASHES` or `POPS`."""

    @skippable(stash=stashes, pop=pops)
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, value: Any) -> Any:
            x = _first(value)
            value = self.layer(value)
            for name, how in pops.items():
                skip = yield pop(name)
                if skip is not None:
                    value = _with_first(value, how(_first(value), skip))
            for name, how in stashes.items():
                yield stash(name, how(x, _first(value)))
            return value

    return Skipping()


def _first(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def _with_first(value: Any, y: Any) -> Any:
    if isinstance(value, Tensor):
        return y
    parts = (*((y,) if isinstance(y, Tensor) else y), *value[1:])
    return value._make(parts) if hasattr(value, "_make") and len(parts) == len(value) else parts
