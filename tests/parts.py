"""Layers that several tests use: a pair with a skip, and one that fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import is_recomputing
from torchgpipe.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stash what one function makes of the input, and return what another makes of it."""

    def __init__(self, skip: Callable[[Any], Any] = torch.sin, output: Callable[[Any], Any] = torch.cos) -> None:
        super().__init__()
        self.skip, self.output = skip, output

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.skip(x))
        return self.output(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Return what a function makes of the input and the skip."""

    def __init__(self, join: Callable[[Any, Any], Any] = torch.mul) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Any) -> Any:
        skip = yield pop("skip")
        return self.join(x, skip)


class Fails(nn.Module):
    """The identity; after `fail(…)` it raises an error, once: in forward, in a recomputation or in backward.

    After `at(…)` it calls something instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.when, self.calls_before = "", 0
        self.act: Callable[[], object] = int

    def fail(self, when: str, error: BaseException, *, calls_before: int = 0) -> None:
        self.at(when, partial(explode, error), calls_before=calls_before)

    def at(self, when: str, act: Callable[[], object], *, calls_before: int = 0) -> None:
        self.when, self.act, self.calls_before = when, act, calls_before

    def forward(self, x: Tensor) -> Tensor:
        self.reach("recompute" if is_recomputing() else "forward")
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda grad: self.reach("backward"))
        return y

    def reach(self, now: str) -> None:
        if now != self.when:
            return
        if self.calls_before:
            self.calls_before -= 1
            return
        act, self.when, self.act = self.act, "", int
        act()


def explode(error: BaseException) -> None:
    raise error
