"""Time plans of a model with 2,000 layers on 8 devices, and the replay of a million tasks.

The tests need pytest-benchmark and have limits in seconds. The replayed schedule is made before the
clock starts, since it is made only once for the many balances that a plan replays.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import GELU, Linear, Sequential

from torchgpipe.plan import plan
from torchgpipe.plan.replay import Costs, recomputing, replay

LAYERS = 2000
TASKS = 1_000_000
PARTITIONS = 8
MICRO_BATCHES = -(-TASKS // (3 * PARTITIONS))

Width = Callable[[int], int]


def alike(i: int) -> int:
    """Return one width for all layers, of which only the first layer is counted."""
    return 512


def repeated(i: int) -> int:
    """Return one of ten widths."""
    return 256 + 16 * (i % 10)


def different(i: int) -> int:
    """Return a width of its own for each layer."""
    return 256 + i


# The width of linear layer i, and the limit in seconds.
MODELS: dict[str, tuple[Width, float]] = {
    "alike": (alike, 10.0),
    "repeated": (repeated, 10.0),
    "different": (different, 90.0),
}


def check_limit(benchmark: Any, limit: float) -> None:
    """Check that the timed call took less than `limit` seconds, if benchmarks are enabled."""
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = limit
        assert benchmark.stats.stats.max < limit


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_plan(benchmark: Any, name: str, memory: str) -> None:
    """Plan balance, micro-batches and checkpointing; with fewer layers if benchmarks are off."""
    width, limit = MODELS[name]
    layers = LAYERS if benchmark.enabled else LAYERS // 10
    model = Sequential()
    with torch.device("meta"):
        for i in range(layers // 2):
            model.append(Linear(width(i), width(i + 1)))
            model.append(GELU())
    x = torch.empty(4, width(0))
    arguments = {
        "batch_size": 512,
        "devices": 8,
        "memory": memory,
        "hardware": "p40x8",
        "optimizer": "adam",
    }
    found = benchmark.pedantic(plan, args=(model, x), kwargs=arguments, rounds=1)
    check_limit(benchmark, limit)
    assert sum(found.balance) == layers


@pytest.mark.parametrize("blocking", [False, True])
def test_replay(benchmark: Any, blocking: bool) -> None:
    """Replay the schedule in at most five seconds."""
    row = [1.0 + j for j in range(PARTITIONS)]
    table = [row] * MICRO_BATCHES
    skips = {(0, PARTITIONS - 1): 0.1}
    costs = Costs(table, table, table, copy=0.1, skips=skips, blocking=blocking)
    replay(costs, recomputing("GPipe", PARTITIONS, MICRO_BATCHES))
    timeline = benchmark.pedantic(replay, args=(costs,), rounds=1)
    check_limit(benchmark, 5.0)
    assert len(timeline.events) == 3 * MICRO_BATCHES * PARTITIONS
    assert len(timeline.events) >= TASKS
