"""Seconds to plan a deep model, under pytest-benchmark: 2,000 layers on 8 devices are to take less than 10.

That is for layers that repeat, as those of deep models do: each kind is counted once. Where no two layers are of one
shape, every one is run on `meta`, which alone takes more, so that case has a limit of its own.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan import plan

LAYERS = 2000


def alike(layers: int) -> nn.Sequential:
    """Layers of two kinds, over and over."""
    return nn.Sequential(*(layer for _ in range(layers // 2) for layer in (nn.Linear(512, 512), nn.GELU())))


def repeated(layers: int) -> nn.Sequential:
    """Layers of twenty kinds, one after another, over and over."""
    widths = [256 + 16 * (i % 10) for i in range(layers // 2 + 1)]
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))


def different(layers: int) -> nn.Sequential:
    """No two matrices of one shape, so that every one is counted."""
    widths = [256 + i for i in range(layers // 2 + 1)]
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))


LIMITS = {alike: 10.0, repeated: 10.0, different: 90.0}
"""Seconds."""


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("build", LIMITS)
def test_plan(benchmark: Any, build: Any, memory: str) -> None:
    """Time to choose balance, micro-batches and checkpointing; fewer layers where nothing is timed."""
    layers = LAYERS if benchmark.enabled else LAYERS // 10
    with torch.device("meta"):
        model = build(layers)
    x = torch.empty(4, model[0].in_features)
    arguments = {"batch_size": 512, "devices": 8, "memory": memory, "hardware": "p40x8", "optimizer": "adam"}
    found = benchmark.pedantic(plan, args=(model, x), kwargs=arguments, rounds=1)
    assert sum(found.balance) == layers
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = LIMITS[build]
        assert benchmark.stats.stats.max < LIMITS[build]
