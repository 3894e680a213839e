"""A clock on which time passes only where a layer says so. The fixture `clock` lets profiles be timed by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Clock:
    """Seconds since `start`, and what took them."""

    def start(self) -> None:
        self.now = 0.0
        self.history: list[str] = []

    def spend(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.history.append(what)


CLOCK = Clock()


def spend(x: Tensor, forward: float, backward: float, name: str = "") -> Tensor:
    """Hand on a tensor; take `forward` seconds now, and `backward` seconds in backward."""
    y: Tensor = _Spend.apply(x, forward, backward, name)
    return y


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float, name: str) -> Tensor:
        CLOCK.spend(forward, f"{name} forward")
        ctx.spend = backward, f"{name} backward"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        CLOCK.spend(*ctx.spend)
        return grads[0], None, None, None
