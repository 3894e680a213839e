"""Define small layers for tests, such as layers made of a function and layers with a skip."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace, pop, skippable, stash

from ..behaviours.parts.layers import Do


def same(x: Any) -> Any:
    return x


def linears(count: int) -> nn.Sequential:
    layers = [nn.Linear(2, 2) for _ in range(count)]
    return nn.Sequential(*layers)


def compiled_in_place(layer: Any) -> nn.Module:
    layer.compile(backend="aot_eager")
    return layer


def compiled_around(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend="aot_eager")  # type: ignore[return-value]


def Lambda(function: Callable[[Any], Any]) -> nn.Module:
    return Do(lambda _, x: function(x))


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes `skip(input)`, which a later `Pop` uses, and returns `output(input)`."""

    def __init__(
        self, skip: Callable[[Any], Any] = same, output: Callable[[Any], Any] = same
    ) -> None:
        super().__init__()
        self.skip = skip
        self.output = output

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.skip(x))
        return self.output(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """A layer that pops the skip of an earlier `Stash`, and returns `join(input, skip)`."""

    def __init__(self, join: Callable[[Any, Any], Any] = torch.add) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Any) -> Any:
        skip = yield pop("skip")
        return self.join(x, skip)


def partitions(
    layers: Sequence[nn.Module],
    skips: Iterable[tuple[int, int]],
    stashed: Callable[[Any], Any] = same,
) -> tuple[nn.Sequential, list[int]]:
    """Add skip connections between layers. Return all layers and the balance of their partitions.

    Args:
        layers: The layers. Each becomes a partition, together with the new layers beside it.
        skips: A pair `(source, target)` of indices of `layers` for each skip.
        stashed: A function that computes the skip from the output of layer `source`.

    For each pair, a new layer right after layer `source` stashes the skip. A new layer right before
    layer `target` pops the skip, and adds it to its own input.
    """
    found = [[layer] for layer in layers]
    for source, target in skips:
        namespace = Namespace()
        stashing: Any = Stash(stashed)
        popping: Any = Pop()
        found[source].append(stashing.isolate(namespace))
        found[target].insert(0, popping.isolate(namespace))
    balance = list(map(len, found))
    return nn.Sequential(*chain.from_iterable(found)), balance
