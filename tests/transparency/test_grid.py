"""Output, loss and gradients do not depend on balance, chunks, batch size, checkpointing or engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

from .compare import alike, total, transparent


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)
    )


balances = pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2]], ids=lambda b: f"n{len(b)}")


@pytest.mark.parametrize("batch", [13, 8, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 20])
@balances
def test_every_schedule(balance: list[int], chunks: int, batch: int, way: dict[str, Any]) -> None:
    transparent(layers(), torch.randn(batch, 5).requires_grad_(), balance, chunks=chunks, **way)


@pytest.mark.parametrize("switch", ["dependency", "portals", "copy_streams"])
@balances
def test_every_component_can_be_switched_off(switch: str, balance: list[int], way: dict[str, Any]) -> None:
    transparent(layers(), torch.randn(13, 5).requires_grad_(), balance, chunks=8, **{switch: False}, **way)


def test_a_batch_without_samples(way: dict[str, Any]) -> None:
    outcome = transparent(layers(), torch.randn(0, 5).requires_grad_(), [3, 3], **way)
    assert outcome.outputs[0].shape == (0, 4)


@pytest.mark.parametrize("chunks", [1, 4])
def test_an_input_that_is_no_leaf(chunks: int, way: dict[str, Any]) -> None:
    encoder, x = nn.Linear(3, 5), torch.randn(9, 3)

    def use(run: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(total(run(encoder(x).sigmoid())), [*encoder.parameters()]))

    alike(use, layers(), [2, 2, 2], chunks=chunks, **way)


@pytest.mark.parametrize("engine", ["auto", "graph", "workers"])
def test_mini_batches_of_different_sizes(way: dict[str, Any]) -> None:
    # With a single sample there is nothing to overlap, for which "auto" has another engine.
    def use(run: nn.Module) -> list[Tensor]:
        found = []
        for size in (9, 1, 4, 1, 1, 9):
            run.zero_grad()
            found.append(run(torch.randn(size, 5)))
            total(found[-1]).backward()
            found += [p.grad.clone() for p in run.parameters()]
        return found

    alike(use, layers(), [2, 2, 2], **way)


@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: Any, training: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(72, 4)
    )
    model = GPipe(module, [2, 2, 2], devices=["meta"] * 3, chunks=4, checkpoint=checkpoint).train(training)
    x = torch.randn(13, 3, 5, 5, device="meta", requires_grad=True)
    y = model(x)
    assert (y.device.type, y.shape) == ("meta", (13, 4))
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.is_meta for p in model.parameters())
