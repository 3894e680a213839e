"""Time per task of the machinery, under pytest-benchmark: forward and backward apart.

One round is one mini-batch; `us_per_task` in the extra info is its median over n·m tasks. The layers are
`Linear(8, 8)`, so nearly all of it is the pipeline's own cost; `plain` is a loop over the same layers without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.machinery_child import build

MODES = ["plain", "never", "plain checkpointed", "always"]


@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_machinery(benchmark: Any, direction: str, mode: str, n: int, m: int) -> None:
    """One mini-batch of m micro-batches through n partitions, in one direction."""
    model = build(n, m, mode)
    x = torch.randn(m, 8)
    if direction == "forward":
        y = benchmark.pedantic(model, args=(x,), rounds=50, warmup_rounds=5)
    else:

        def loss() -> tuple[tuple[Tensor], dict[str, Any]]:
            return (model(x).sum(),), {}

        benchmark.pedantic(Tensor.backward, setup=loss, rounds=50, warmup_rounds=5)
        y = model(x)
    assert y.shape == (m, 8) and y.requires_grad
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_task"] = benchmark.stats.stats.median / (n * m) * 1e6
