"""How a mini-batch is split, and what of a pipeline can be switched off: neither matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..parts.layers import WIDTH, five
from ..row import Row, step


def batch(size: int) -> Any:
    return lambda: torch.randn(size, WIDTH).requires_grad_()


def sizes(run: nn.Module, value: Tensor) -> list[Any]:
    """With a single sample there is nothing to overlap, for which "auto" has another engine."""
    return [(step(run, value[:size]), [p.grad for p in run.parameters()]) for size in (9, 1, 4, 1, 1, 9)]


ROWS = [
    *(Row(f"{b} samples, {m} micro-batches", given=batch(b), chunks=m)
      for b, m in ((13, 8), (13, 2), (8, 8), (8, 3), (1, 2), (1, 20), (0, 3), (8, 20))),
    *(Row(f"a balance of {balance}", given=batch(13), balance=balance, chunks=8)
      for balance in ((2, 3), (2, 1, 1, 1), (1, 1, 3))),
    *(Row(f"without {switch}", given=batch(13), balance=(2, 1, 1, 1), chunks=8, options={switch: False},
          without={"ranks": "they have no such components"})
      for switch in ("dependency", "portals", "copy_streams")),
    Row("mini-batches of different sizes", given=batch(9), use=sizes),
    Row("mini-batches of different sizes, any engine", given=batch(9), use=sizes, options={"engine": "auto"},
        without={"ranks": "they are one engine"}),
    Row("layers of one kind each", lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(),
        nn.LayerNorm(6), nn.Linear(6, 4, bias=False)), balance=(2, 1, 1, 2)),
    Row("no gradient for the input", five, lambda: torch.randn(8, WIDTH)),
]  # fmt: skip
