"""Layers made of functions, with and without a skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.skip import pop, skippable, stash


def same(x: Any) -> Any:
    return x


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stash what one function makes of the input, and return what another makes of it."""

    def __init__(self, skip: Callable[[Any], Any] = same, output: Callable[[Any], Any] = same) -> None:
        super().__init__()
        self.skip, self.output = skip, output

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.skip(x))
        return self.output(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Return what a function makes of the input and the skip."""

    def __init__(self, join: Callable[[Any, Any], Any] = torch.add) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Any) -> Any:
        skip = yield pop("skip")
        return self.join(x, skip)
