"""Dependency: make the autograd engine run micro-batch i before i - 1 (torchgpipe paper, section 3.2.2).

Nothing in a model says in which order its micro-batches go backward through a partition. `fork` splits an empty
tensor, the phony, off the output of task (i - 1, j); `join` ties it into the input of task (i, j). Backward
through the fork then has to wait for the phony's gradient, which only task (i, j) can send:

    (i-1, j) → fork ──────────────→ …          forward
                  ╰ phony ╮
        … ────────────→ join → (i, j)

The phony lives on the CPU whatever the device of the data: the engine synchronizes streams for the gradients
of device tensors, and an edge that only orders work must not make a stream wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiable", "fork", "join"]


def differentiable(x: Tensor) -> bool:
    """Return whether a tensor of this type can take a gradient."""
    return x.is_floating_point() or x.is_complex()


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` and a phony, an empty CPU tensor, whose gradient `x`'s backward will wait for.

    Where `x` takes no gradient there is nothing to order, and the phony takes none either.
    """
    if x.requires_grad and torch.is_grad_enabled():
        y, phony = _Fork.apply(x)
        return y, phony
    return x, torch.empty(0)


def join(x: Tensor, phony: Tensor) -> Tensor:
    """Return `x` such that its backward comes before the backward of the fork that made `phony`.

    Only floating-point (or complex) tensors take part in autograd: for others this raises `TypeError`.
    """
    if not (phony.requires_grad and torch.is_grad_enabled()):
        return x
    if not differentiable(x):
        raise TypeError(f"join needs a floating-point tensor, but got one of {x.dtype}")
    y: Tensor = _Join.apply(x, phony)
    return y


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.detach(), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor]:
        return grads[0], torch.empty(0)
