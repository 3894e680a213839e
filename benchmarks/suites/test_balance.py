"""Time to balance a model, with pytest-benchmark: profiling and search together, and the search alone."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from reproduce.models.built import amoebanetd, unet
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.balance.profile import profile_times

MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "AmoebaNet-D (3, 8)": (lambda: amoebanetd(3, 8), (1, 3, 224, 224)),
    "U-Net (1, 8)": (lambda: unet(3, 1, 8), (2, 3, 32, 32)),
}


# "by time": profile the time of every layer (copy, warm up, forward and backward) and search; "times": without search.
# "by size": count the bytes that every layer saves in a forward, and search; "on meta": without computing anything.
WAYS: dict[str, Callable[[nn.Sequential, torch.Tensor], Sequence[float]]] = {
    "by time": lambda layers, sample: balance_by_time(2, layers, sample, timeout=0.0, device="cpu"),
    "times": lambda layers, sample: profile_times(layers, sample, 0.0, torch.device("cpu")),
    "by size": lambda layers, sample: balance_by_size(2, layers, sample, device="cpu"),
    "by size, on meta": lambda layers, sample: balance_by_size(2, layers, sample, device="meta"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_balance(benchmark: Any, name: str, way: str) -> None:
    """Balance a model for two partitions, with the shortest possible profile."""
    make, shape = MODELS[name]
    layers, sample = make(), torch.rand(*shape)
    found = benchmark.pedantic(WAYS[way], args=(layers, sample), rounds=5, warmup_rounds=1)
    assert (len(found) if way == "times" else sum(found)) == len(layers)


@pytest.mark.parametrize("partitions", [2, 8])
@pytest.mark.parametrize("layers", [24, 241, 1058])
def test_minimise_heaviest(benchmark: Any, layers: int, partitions: int) -> None:
    """Search the balance for given costs. The numbers of layers are those of the papers' models."""
    costs = [random.Random(layers).uniform(0.1, 10.0) for _ in range(layers)]
    balance = benchmark.pedantic(
        minimise_heaviest, args=(costs, partitions), rounds=10, warmup_rounds=1
    )
    assert sum(balance) == layers and len(balance) == partitions
