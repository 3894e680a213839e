"""Layers made of functions, and partitions with skips from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe.skip import Namespace

from ..parts import Pop, Stash


def same(x: Any) -> Any:
    return x


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def partitions(
    layers: Sequence[nn.Module], skips: Iterable[tuple[int, int]], stashed: Callable[[Any], Any] = same
) -> tuple[nn.Sequential, list[int]]:
    """Return layers for a partition each, with skips from one to another, of what a function makes; and the balance."""
    found = [[layer] for layer in layers]
    for source, target in skips:
        namespace = Namespace()
        found[source].append(Stash(stashed, same).isolate(namespace))  # type: ignore[operator]
        found[target].insert(0, Pop(torch.add).isolate(namespace))  # type: ignore[operator]
    return nn.Sequential(*(layer for partition in found for layer in partition)), [*map(len, found)]
