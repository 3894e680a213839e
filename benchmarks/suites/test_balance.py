"""Measure with pytest-benchmark how long it takes to balance a model.

Balancing consists of profiling the layers and searching for the balance. `test_balance` measures
both, or only profiling. `test_minimise_heaviest` measures only the search.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Sequential

from reproduce.models.built import amoebanetd, unet
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import profile_times

CPU = torch.device("cpu")


class Model(NamedTuple):
    """A model to balance: a function that builds it, and the shape of its input."""

    build: Callable[[], Sequential]
    shape: tuple[int, ...]


MODELS = {
    "AmoebaNet-D (3, 8)": Model(lambda: amoebanetd(3, 8), (1, 3, 224, 224)),
    "U-Net (1, 8)": Model(lambda: unet(3, 1, 8), (2, 3, 32, 32)),
}


def by_time(layers: Sequential, sample: Tensor) -> Sequence[float]:
    """Time each layer (copy, warm-up, forward, backward), and return a balance by time."""
    return balance_by_time(2, layers, sample, timeout=0.0, device="cpu")


def times(layers: Sequential, sample: Tensor) -> Sequence[float]:
    """Return the time of each layer, without searching for a balance."""
    return profile_times(layers, sample, 0.0, CPU)


def by_size(layers: Sequential, sample: Tensor) -> Sequence[float]:
    """Count the bytes that each layer needs, and return a balance by size."""
    return balance_by_size(2, layers, sample, device="cpu")


def by_size_on_meta(layers: Sequential, sample: Tensor) -> Sequence[float]:
    """Return a balance by size, found on the `meta` device, which computes nothing."""
    return balance_by_size(2, layers, sample, device="meta")


WAYS = {
    "by time": by_time,
    "times": times,
    "by size": by_size,
    "by size, on meta": by_size_on_meta,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_balance(benchmark: Any, name: str, way: str) -> None:
    """Measure how long it takes to find a balance of two partitions, or only to time the layers."""
    model = MODELS[name]
    layers = model.build()
    sample = torch.rand(*model.shape)
    found = benchmark.pedantic(WAYS[way], args=(layers, sample), rounds=5, warmup_rounds=1)
    count = len(found) if way == "times" else sum(found)
    assert count == len(layers)


@pytest.mark.parametrize("partitions", [2, 8])
@pytest.mark.parametrize("layers", [24, 241, 1058])
def test_minimise_heaviest(benchmark: Any, layers: int, partitions: int) -> None:
    """Measure how long it takes to find a balance of layers with random costs.

    The numbers of layers are those of models in the papers.
    """
    draw = random.Random(layers)
    costs = [draw.uniform(0.1, 10.0) for _ in range(layers)]
    given = costs, partitions
    balance = benchmark.pedantic(minimise_heaviest, args=given, rounds=10, warmup_rounds=1)
    assert sum(balance) == layers
    assert len(balance) == partitions
