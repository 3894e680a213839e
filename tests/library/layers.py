"""Provide small layers for tests: linear layers, layers of functions, skips, compiled layers."""

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
    """Compile the layer's call in place, and return the same layer."""
    layer.compile(backend="aot_eager")
    return layer


def compiled_around(layer: nn.Module) -> nn.Module:
    """Return `torch.compile(layer)`, a module that wraps the layer."""
    return torch.compile(layer, backend="aot_eager")  # type: ignore[return-value]


def Lambda(function: Callable[[Any], Any]) -> nn.Module:
    return Do(lambda _, x: function(x))


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes `skip(input)` and returns `output(input)`."""

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
    """A layer that pops the skip and returns `join(input, skip)`."""

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
    """Add skips to layers. Return all layers, and a balance that gives each layer a partition.

    A skip is a pair `(source, target)` of layer indices. After layer `source`, a new layer stashes
    `stashed(x)`. Before layer `target`, a new layer pops the skip and adds it to its input. The new
    layers are in the partition of the layer that they are next to.
    """
    found = [[layer] for layer in layers]
    for source, target in skips:
        namespace = Namespace()
        found[source].append(Stash(stashed).isolate(namespace))  # type: ignore[operator]
        found[target].insert(0, Pop().isolate(namespace))  # type: ignore[operator]
    balance = list(map(len, found))
    return nn.Sequential(*chain.from_iterable(found)), balance
