"""Time to plan a model of 2,000 layers on 8 devices, and to replay a million tasks, with pytest-benchmark, and limits.

The replayed schedule is made before: it is made once for the many balances that a plan replays.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.plan import plan
from torchgpipe.plan.replay import Costs, recomputing, replay

LAYERS, TASKS, PARTITIONS = 2000, 1_000_000, 8
MICRO_BATCHES = -(-TASKS // (3 * PARTITIONS))


# The width of linear layer i, and the limit in seconds. Of layers with one shape only the first is counted.
MODELS: dict[str, tuple[Callable[[int], int], float]] = {
    "alike": (lambda i: 512, 10.0),
    "repeated": (lambda i: 256 + 16 * (i % 10), 10.0),
    "different": (lambda i: 256 + i, 90.0),
}


def timed(
    benchmark: Any, limit: float, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Time one call, which may take so many seconds."""
    found = benchmark.pedantic(function, args=args, kwargs=kwargs, rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = limit
        assert benchmark.stats.stats.max < limit
    return found


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_plan(benchmark: Any, name: str, memory: str) -> None:
    """Plan balance, micro-batches and checkpointing; with fewer layers if benchmarks are disabled."""
    layers, (width, limit) = LAYERS if benchmark.enabled else LAYERS // 10, MODELS[name]
    widths = map(width, range(layers // 2 + 1))
    with torch.device("meta"):
        model = nn.Sequential(
            *(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU()))
        )
    x = torch.empty(4, width(0))
    arguments = {
        "batch_size": 512,
        "devices": 8,
        "memory": memory,
        "hardware": "p40x8",
        "optimizer": "adam",
    }
    assert sum(timed(benchmark, limit, plan, model, x, **arguments).balance) == layers


@pytest.mark.parametrize("blocking", [False, True])
def test_replay(benchmark: Any, blocking: bool) -> None:
    """Replay the schedule in at most five seconds."""
    table = [[1.0 + j for j in range(PARTITIONS)] for _ in range(MICRO_BATCHES)]
    costs = Costs(
        table, table, table, copy=0.1, skips={(0, PARTITIONS - 1): 0.1}, blocking=blocking
    )
    replay(costs, recomputing("GPipe", PARTITIONS, MICRO_BATCHES))
    timeline = timed(benchmark, 5.0, replay, costs)
    assert len(timeline.events) == 3 * MICRO_BATCHES * PARTITIONS >= TASKS
