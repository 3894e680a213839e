"""Output, loss and gradients do not depend on balance, chunks, batch size, checkpointing or engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe

from .compare import assert_same_use, assert_transparent, total


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)
    )


balances = pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2]], ids=lambda b: f"n{len(b)}")


@pytest.mark.parametrize("batch", [13, 8, 1, 0])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 20])
@balances
def test_every_schedule(balance: list[int], chunks: int, batch: int, way: dict[str, Any]) -> None:
    outcome = assert_transparent(layers(), torch.randn(batch, 5).requires_grad_(), balance, chunks=chunks, **way)
    assert outcome.outputs[0].shape == (batch, 4)


@pytest.mark.parametrize("switch", ["dependency", "portals", "copy_streams"])
@balances
def test_every_component_can_be_switched_off(switch: str, balance: list[int], way: dict[str, Any]) -> None:
    assert_transparent(layers(), torch.randn(13, 5).requires_grad_(), balance, chunks=8, **way | {switch: False})


@pytest.mark.parametrize("engine", ["auto", "graph", "workers", "ranks"])
def test_mini_batches_of_different_sizes(way: dict[str, Any]) -> None:
    # With a single sample there is nothing to overlap, for which "auto" has another engine.
    def use(run: nn.Module) -> list[Any]:
        found: list[Any] = []
        for size in (9, 1, 4, 1, 1, 9):
            run.zero_grad()
            y = run(torch.randn(size, 5))
            total(y).backward()
            found += [y, *(p.grad for p in run.parameters())]
        return found

    assert_same_use(use, layers(), [2, 2, 2], **way)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: Any, training: bool, deferred: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(72, 4)
    )
    options = {"chunks": 4, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    model = GPipe(module, [2, 2, 2], devices=["meta"] * 3, **options).train(training)
    x = torch.randn(13, 3, 5, 5, device="meta", requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.device.type, y.shape) == ("meta", (13, 4))
    assert all(p.grad is not None and p.grad.is_meta and p.grad.shape == p.shape for p in (x, *model.parameters()))
