"""Time to replay a schedule of a million tasks, with pytest-benchmark. The limit is five seconds."""

from typing import Any

import pytest

from torchgpipe.plan.replay import Costs, replay

TASKS, PARTITIONS, LIMIT = 1_000_000, 8, 5.0
MICRO_BATCHES = -(-TASKS // (3 * PARTITIONS))


@pytest.mark.parametrize("blocking", [False, True])
def test_replay(benchmark: Any, blocking: bool) -> None:
    table = [[1.0 + j for j in range(PARTITIONS)] for _ in range(MICRO_BATCHES)]
    costs = Costs(table, table, table, copy=0.1, skips={(0, PARTITIONS - 1): 0.1}, blocking=blocking)
    timeline = benchmark.pedantic(replay, args=(costs,), rounds=1)
    assert len(timeline.events) == 3 * MICRO_BATCHES * PARTITIONS >= TASKS
    if benchmark.stats is not None:
        benchmark.extra_info["limit_seconds"] = LIMIT
        assert benchmark.stats.stats.max < LIMIT
