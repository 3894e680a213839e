"""Time to plan a deep model, with pytest-benchmark. The limit is 10 s for 2,000 layers on 8 devices.

It is for repeated layers, as deep models have: each kind is counted once. If no two layers have the same shape, every
layer runs on `meta`, which alone takes longer. So that case has its own limit.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan import plan

LAYERS = 2000


def alike(layers: int) -> nn.Sequential:
    """Build layers of two kinds, repeated."""
    return nn.Sequential(*(layer for _ in range(layers // 2) for layer in (nn.Linear(512, 512), nn.GELU())))


def repeated(layers: int) -> nn.Sequential:
    """Build layers of twenty kinds, repeated in order."""
    widths = [256 + 16 * (i % 10) for i in range(layers // 2 + 1)]
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))


def different(layers: int) -> nn.Sequential:
    """Build linear layers of which no two have the same shape, so that each is counted."""
    widths = [256 + i for i in range(layers // 2 + 1)]
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))


LIMITS = {alike: 10.0, repeated: 10.0, different: 90.0}
"""Seconds."""


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("build", LIMITS)
def test_plan(benchmark: Any, build: Any, memory: str) -> None:
    """Plan balance, micro-batches and checkpointing; with fewer layers if benchmarks are disabled."""
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
