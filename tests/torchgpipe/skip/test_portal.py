"""Portals: a skip passes by the partitions in between, and nothing holds it after its last use."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash


@skippable(stash=["a"])
class Stash(nn.Module):
    seen: weakref.ref[Any]

    def forward(self, x: Tensor) -> Any:
        skip = x * 3
        Stash.seen = weakref.ref(skip.untyped_storage())
        yield stash("a", skip)
        del skip
        return x + 1


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("a")
        return x + skip.sum()


class Look(nn.Module):
    """Note what it is given, and whether the skip is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[type, bool]] = []

    def forward(self, x: Any) -> Any:
        self.notes.append((type(x), Stash.seen() is not None))
        return x


@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_released_after_its_last_use(engine: Any) -> None:
    between, after = Look(), Look()
    model = GPipe(nn.Sequential(Stash(), between, Pop(), after), [1, 1, 1, 1], devices=["cpu"] * 4, engine=engine)
    with torch.no_grad():
        model(torch.ones(2))
    gc.collect()
    # The partition in between gets the micro-batch alone while the skip is under way; after its use it is gone.
    assert between.notes == [(Tensor, True)]
    assert after.notes == [(Tensor, False)]


@pytest.mark.parametrize("engine", ["graph", "workers"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_released_when_backward_has_used_it(engine: Any, checkpoint: Any) -> None:
    layers = nn.Sequential(Stash(), nn.Identity(), Pop())
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, engine=engine, checkpoint=checkpoint)
    x = torch.ones(2, requires_grad=True)
    loss = model(x).sum()
    loss.backward()
    gc.collect()
    assert Stash.seen() is None
    # d/dx of sum(x + 1 + sum(3x)) over two elements
    assert torch.equal(x.grad, torch.tensor([7.0, 7.0]))  # type: ignore[arg-type]
