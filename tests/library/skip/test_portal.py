"""Portals: a skip passes by the partitions in between, and nothing holds it after its last use.

What backward keeps of it is in tests/library/test_kept.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...plain import piped
from ..layers import Lambda, Pop, Stash


def test_released_after_its_last_use(engine: str) -> None:
    skips: list[weakref.ref[Any]] = []
    notes: list[tuple[type, bool]] = []

    def make(x: Tensor) -> Tensor:
        skip = x * 3
        skips.append(weakref.ref(skip.untyped_storage()))
        return skip

    def look(x: Any) -> Any:
        """Note what a layer is given, and whether the skip is alive."""
        notes.append((type(x), skips[0]() is not None))
        return x

    layers = nn.Sequential(Stash(make), Lambda(look), Pop(lambda x, skip: x + skip.sum()), Lambda(look))
    with torch.no_grad():
        piped(layers, [1, 1, 1, 1], 1, engine=engine)(torch.ones(2))
    gc.collect()
    # The partition in between gets the micro-batch alone while the skip is under way; after its use it is gone.
    assert notes == [(Tensor, True), (Tensor, False)]
