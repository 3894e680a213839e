"""Time that it takes to balance a model, under pytest-benchmark: the profiling of its layers, and the search alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.models import amoebanetd, unet
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import profile_times

MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "AmoebaNet-D (3, 8)": (lambda: amoebanetd(3, 8), (1, 3, 224, 224)),
    "U-Net (1, 8)": (lambda: unet(3, 1, 8), (2, 3, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_balance_by_time(benchmark: Any, name: str) -> None:
    """Copy every layer, warm it up, run it forward and backward once, and search: the least that it takes."""
    make, shape = MODELS[name]
    layers, sample = make(), torch.rand(*shape)
    balance = benchmark.pedantic(
        balance_by_time, args=(2, layers, sample), kwargs={"timeout": 0.0, "device": "cpu"}, rounds=5, warmup_rounds=1
    )
    assert sum(balance) == len(layers)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MODELS)
def test_balance_by_size(benchmark: Any, name: str, device: str) -> None:
    """Run every layer forward, counting what it keeps, and search; on meta devices nothing is computed."""
    make, shape = MODELS[name]
    layers, sample = make(), torch.rand(*shape)
    balance = benchmark.pedantic(
        balance_by_size, args=(2, layers, sample), kwargs={"device": device}, rounds=5, warmup_rounds=1
    )
    assert sum(balance) == len(layers)


@pytest.mark.parametrize("name", MODELS)
def test_profile_times(benchmark: Any, name: str) -> None:
    """Time every layer once, without the search."""
    make, shape = MODELS[name]
    layers, sample = make(), torch.rand(*shape)
    times = benchmark.pedantic(
        profile_times, args=(layers, sample, 0.0, torch.device("cpu")), rounds=5, warmup_rounds=1
    )
    assert len(times) == len(layers)


@pytest.mark.parametrize("partitions", [2, 8])
@pytest.mark.parametrize("layers", [24, 241, 1058])
def test_minimise_heaviest(benchmark: Any, layers: int, partitions: int) -> None:
    """Find the balance for costs that are known: of as many layers as the papers' models have."""
    costs = [random.Random(layers).uniform(0.1, 10.0) for _ in range(layers)]
    balance = benchmark.pedantic(minimise_heaviest, args=(costs, partitions), rounds=10, warmup_rounds=1)
    assert sum(balance) == layers and len(balance) == partitions
