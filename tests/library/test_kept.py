"""Between forward and backward a pipeline keeps no activation that checkpointing saves, and a skip only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Task

from ..parts import Pop, Stash
from ..plain import piped
from .ledger import Ledger

# Many samples of few features, so that activations outweigh the gradients of weights.
WIDTH = 8
BATCH, CHUNKS = 512, 8
# Bytes of a tensor of WIDTH features for each sample of a micro-batch.
UNIT = BATCH // CHUNKS * WIDTH * torch.float32.itemsize
# What a micro-batch keeps for backward in each partition of `layers`, if not checkpointed: the outputs of tanh and
# sigmoid. The input is the output of the partition before, or the caller's.
ACTIVATIONS = 2 * UNIT


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid())))


def pipeline(module: nn.Sequential, balance: Sequence[int] = (3, 3, 3), **options: Any) -> tuple[GPipe, Ledger]:
    model = piped(module, balance, CHUNKS, **options)
    with_gradients(model)
    ledger = model.observer = Ledger()
    return model, ledger


def with_gradients(model: nn.Module) -> None:
    """Let gradients accumulate in place, so that a step makes no tensor that stays."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def test_only_inputs_of_tasks_are_kept_for_backward(way: dict[str, Any]) -> None:
    model, ledger = pipeline(layers(), **way)
    y = model(torch.randn(BATCH, WIDTH))
    # Of a checkpointed micro-batch, the inputs of the second and third partition.
    count = checkpointed(way["checkpoint"], CHUNKS)
    ledger.assert_comes_to(count * 2 * UNIT + (CHUNKS - count) * 3 * ACTIVATIONS)
    y.sum().backward()
    ledger.assert_comes_to(0)


def test_backward_takes_one_tasks_working_set_more(engine: str) -> None:
    def peak_of_one_task() -> int:
        ledger, module = Ledger(), layers()[:3]
        with_gradients(module)
        x = torch.randn(BATCH // CHUNKS, WIDTH, requires_grad=True)
        x.grad = torch.zeros_like(x)
        with ledger(Task("recompute", 0, 0)):
            module(x).backward(torch.ones_like(x))
        return ledger.peak[0]

    model, ledger = pipeline(layers(), checkpoint="always", engine=engine)
    loss = model(torch.randn(BATCH, WIDTH)).sum()
    kept = ledger.alive
    ledger.peak[0] = 0
    loss.backward()
    # Partitions work at once. As one gives a gradient to the next, it lets go of an input of the same size.
    bound = kept + 3 * peak_of_one_task()
    assert ledger.peak[0] <= bound
    # Were recomputed activations kept, the bound would be passed.
    assert bound < CHUNKS * 3 * ACTIVATIONS


@pytest.mark.parametrize("portals", [True, False])
def test_a_skip_is_kept_by_those_who_need_it(portals: bool, engine: str) -> None:
    module = nn.Sequential(Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop())
    model, ledger = pipeline(module, [1, 1, 1, 1], portals=portals, checkpoint="always", engine=engine)
    y = model(torch.randn(BATCH, WIDTH, requires_grad=True))
    # Three boundaries, and the skip once, however many partitions it passes.
    ledger.assert_comes_to(CHUNKS * (3 + 1) * UNIT)
    y.sum().backward()
    ledger.assert_comes_to(0)


def test_nothing_is_kept_without_gradients(way: dict[str, Any]) -> None:
    model, ledger = pipeline(layers(), **way)
    with torch.no_grad():
        y = model(torch.randn(BATCH, WIDTH))
    ledger.assert_comes_to(0)
    assert y.shape == (BATCH, WIDTH)
