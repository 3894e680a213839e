"""Measure how long it takes to plan a model of 2,000 layers, and to simulate a million tasks.

The model is planned for 8 devices. The times are measured with pytest-benchmark, and have limits.
The time of a simulation (replay) does not include making the schedule, because a plan makes the
schedule only once, and replays it for many balances.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchgpipe.plan import plan
from torchgpipe.plan.predict.replay import Costs, recomputing, replay

LAYERS = 2000
TASKS = 1_000_000
PARTITIONS = 8
TASKS_OF_A_MICRO_BATCH = 3 * PARTITIONS  # forward, recomputation and backward
MICRO_BATCHES = math.ceil(TASKS / TASKS_OF_A_MICRO_BATCH)


class Model(NamedTuple):
    """A model of linear layers to plan, and how many seconds (`limit`) the plan may take.

    The function `width` returns the width of layer i. A plan counts the operations of equal layers
    only once. So planning a model with many different layers takes longer.
    """

    width: Callable[[int], int]
    limit: float


MODELS = {
    "alike": Model(lambda i: 512, 10.0),
    "repeated": Model(lambda i: 256 + 16 * (i % 10), 10.0),
    "different": Model(lambda i: 256 + i, 90.0),
}


def timed(
    benchmark: Any, limit: float, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Time one call of `function`, and fail if the call takes `limit` seconds or more."""
    found = benchmark.pedantic(function, args=args, kwargs=kwargs, rounds=1)
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = limit
        assert benchmark.stats.stats.max < limit
    return found


@pytest.mark.parametrize("memory", ["24GiB", "3GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_plan(benchmark: Any, name: str, memory: str) -> None:
    """Measure how long it takes to plan the balance, the micro-batches and the checkpoint mode.

    If pytest-benchmark is disabled, the model has fewer layers.
    """
    width, limit = MODELS[name]
    layers = LAYERS if benchmark.enabled else LAYERS // 10
    model = nn.Sequential()
    with torch.device("meta"):
        for i in range(layers // 2):
            model.append(nn.Linear(width(i), width(i + 1)))
            model.append(nn.GELU())
    x = torch.empty(4, width(0))
    arguments = {
        "batch_size": 512,
        "devices": 8,
        "memory": memory,
        "hardware": "p40x8",
        "optimizer": "adam",
    }
    found = timed(benchmark, limit, plan, model, x, **arguments)
    assert sum(found.balance) == layers


@pytest.mark.parametrize("blocking", [False, True])
def test_replay(benchmark: Any, blocking: bool) -> None:
    """Simulate a schedule of a million tasks in less than five seconds.

    If pytest-benchmark is disabled, the schedule has fewer tasks.
    """
    micro_batches = MICRO_BATCHES if benchmark.enabled else MICRO_BATCHES // 10
    times = [1.0 + j for j in range(PARTITIONS)]
    table = [times.copy() for _ in range(micro_batches)]
    skips = {(0, PARTITIONS - 1): 0.1}
    costs = Costs(table, table, table, copy=0.1, skips=skips, blocking=blocking)
    replay(costs, recomputing("GPipe", PARTITIONS, micro_batches))
    timeline = timed(benchmark, 5.0, replay, costs)
    events = len(timeline.events)
    assert events == micro_batches * TASKS_OF_A_MICRO_BATCH
    assert events >= TASKS or not benchmark.enabled
