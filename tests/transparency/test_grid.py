"""Output, loss and gradients do not depend on balance, chunks, batch size, checkpointing or engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)
    )


BALANCES = [[6], [2, 4], [1, 2, 3], [2, 1, 1, 2]]


@pytest.mark.parametrize("batch", [13, 8, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("balance", BALANCES, ids=lambda b: f"n{len(b)}")
def test_every_schedule(
    balance: list[int], chunks: int, batch: int, way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    equals_plain(layers, torch.randn(batch, 5).requires_grad_(), balance, chunks=chunks, **way)


@pytest.mark.parametrize("switch", ["dependency", "portals", "copy_streams"])
@pytest.mark.parametrize("balance", BALANCES, ids=lambda b: f"n{len(b)}")
def test_every_component_can_be_switched_off(
    switch: str, balance: list[int], way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    equals_plain(layers, torch.randn(13, 5).requires_grad_(), balance, chunks=8, **{switch: False}, **way)


def test_a_batch_without_samples(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    outcome = equals_plain(layers, torch.randn(0, 5).requires_grad_(), [3, 3], **way)
    assert outcome.outputs["output 0"].shape == (0, 4)


@pytest.mark.parametrize("chunks", [1, 4])
def test_an_input_that_is_no_leaf(chunks: int, way: dict[str, Any], plainly: Any, loss_of: Any) -> None:
    encoder, module = nn.Linear(3, 5), layers()
    x = torch.randn(9, 3)
    grads = []
    for model in (plainly(module, chunks), GPipe(module, [2, 2, 2], devices=["cpu"] * 3, chunks=chunks, **way)):
        encoder.zero_grad()
        loss_of(model(encoder(x).sigmoid())).backward()
        grads.append([p.grad.clone() for p in encoder.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("engine", ["auto", "graph", "workers"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_mini_batches_of_different_sizes(checkpoint: Any, engine: Any, plainly: Any, loss_of: Any) -> None:
    # With a single sample there is nothing to overlap, for which "auto" has another engine.
    module = layers()
    plain = plainly(copy.deepcopy(module), 3)
    model = GPipe(module, [2, 2, 2], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint, engine=engine)
    for size in (9, 1, 4, 1, 1, 9):
        x = torch.randn(size, 5)
        outputs = []
        for run in (plain, model):
            run.zero_grad()
            outputs.append(run(x))
            loss_of(outputs[-1]).backward()
        assert torch.equal(*outputs)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: str, training: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(72, 4)
    )
    model = GPipe(module, [2, 2, 2], devices=["meta"] * 3, chunks=4, checkpoint=checkpoint).train(training)  # type: ignore[arg-type]
    x = torch.randn(13, 3, 5, 5, device="meta", requires_grad=True)
    y = model(x)
    assert (y.device.type, y.shape) == ("meta", (13, 4))
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.is_meta for p in model.parameters())
