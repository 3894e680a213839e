"""Helpers to connect the layers of test models by skips and by tuples of tensors.

If a layer gets a tuple, it uses only the first tensor, and passes on the others.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import pop, skippable, stash

Stashes = Mapping[str, Callable[[Tensor, Tensor], Tensor | None]]
"""For each skip's name, a function of a layer's input and output that returns what is stashed."""
Pops = Mapping[str, Callable[[Tensor, Tensor], Any]]
"""For each skip's name, a function that combines a layer's output with the popped skip."""


def merge(value: Any, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Add up the tensors of a tuple, and return a tensor of the first one's shape.

    All other tensors are first averaged over their features, so that shapes match.
    """
    total, *others = (value,) if isinstance(value, Tensor) else value
    for x in others:
        rows = x.to(total.dtype).reshape(len(x), -1)
        total = add(total, rows.mean(1, keepdim=True))
    return total


# Functions of a layer's input `x` and output `y` that return what the layer stashes.


def double(x: Tensor, _: Tensor) -> Tensor:
    return 2 * x


def the_input(x: Tensor, _: Tensor) -> Tensor:
    return x


def the_output(_: Tensor, y: Tensor) -> Tensor:
    return y


def view_of_input(x: Tensor, _: Tensor) -> Tensor:
    return x.view_as(x)


def half_of_output(_: Tensor, y: Tensor) -> Tensor:
    return y[:, :2]


def detached(_: Tensor, y: Tensor) -> Tensor:
    return y.detach()


def integers(x: Tensor, _: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def nothing(_: Tensor, __: Tensor) -> None:
    return None


STASHES: Stashes = {
    "product": double,
    "input": the_input,
    "output": the_output,
    "view of its input": view_of_input,
    "half of its output": half_of_output,
    "detached": detached,
    "integers": integers,
    "nothing": nothing,
}


# Functions of a layer's output `y` and a popped skip that return what the layer returns.


def add(y: Tensor, skip: Tensor) -> Tensor:
    return merge((y, skip), Tensor.add)


def add_in_place(y: Tensor, skip: Tensor) -> Tensor:
    return merge((y, skip), Tensor.add_)


def both(y: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    return y, skip


def the_skip(y: Tensor, skip: Tensor) -> Tensor:
    """Return the skip if it has the shape of the layer's output `y`, and else return `y`."""
    return skip if skip.shape == y.shape else y


def drop(y: Tensor, _: Tensor) -> Tensor:
    return y


POPS: Pops = {
    "add": add,
    "add in place": add_in_place,
    "return both": both,
    "return it": the_skip,
    "drop": drop,
}


class OnFirst(nn.Module):
    """Apply a layer to the first tensor of a tuple, and return the other tensors unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, ...]) -> Any:
        return _with_first(value, self.layer(value[0]))


def with_skips(layer: nn.Module, stashes: Stashes, pops: Pops) -> Any:
    """Make a layer that also stashes (stores) and pops (takes) skips.

    Args:
        layer: The layer.
        stashes: Maps the name of a skip to a function of `STASHES`, which says what to store.
        pops: Maps the name of a skip to a function of `POPS`, which says how to use the skip.
    """

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
    """Replace the first tensor of a tuple by `y`, and return the new tuple.

    Args:
        value: The tuple. If it is a single tensor instead, `y` itself is returned.
        y: A tensor, or a tuple of tensors, all of which take the place of the first tensor.
    """
    if isinstance(value, Tensor):
        return y
    first = (y,) if isinstance(y, Tensor) else y
    parts = (*first, *value[1:])
    if hasattr(value, "_make") and len(parts) == len(value):
        return value._make(parts)
    return parts
