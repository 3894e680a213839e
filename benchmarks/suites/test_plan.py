"""Time to plan a deep model, with pytest-benchmark. The limit is for 2,000 layers on 8 devices."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan import plan

LAYERS = 2000


# The width of linear layer i, and the limit in seconds. Of layers with one shape only the first is counted.
MODELS: dict[str, tuple[Callable[[int], int], float]] = {
    "alike": (lambda i: 512, 10.0),
    "repeated": (lambda i: 256 + 16 * (i % 10), 10.0),
    "different": (lambda i: 256 + i, 90.0),
}


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_plan(benchmark: Any, name: str, memory: str) -> None:
    """Plan balance, micro-batches and checkpointing; with fewer layers if benchmarks are disabled."""
    layers, (width, limit) = LAYERS if benchmark.enabled else LAYERS // 10, MODELS[name]
    widths = map(width, range(layers // 2 + 1))
    with torch.device("meta"):
        model = nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())))
    x = torch.empty(4, width(0))
    arguments = {"batch_size": 512, "devices": 8, "memory": memory, "hardware": "p40x8", "optimizer": "adam"}
    found = benchmark.pedantic(plan, args=(model, x), kwargs=arguments, rounds=1)
    assert sum(found.balance) == layers
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = limit
        assert benchmark.stats.stats.max < limit
