"""Time of whole training steps (forward, loss, backward, optimizer) of small models on CPU, under pytest-benchmark.

Naive model parallelism, checkpoint-only and GPipe do the same work at equal batch size, so their times compare.
"""

from __future__ import annotations

from typing import Any

import pytest

from reproduce.regression.cases import TRAINING, Case, prepare


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_training_step(benchmark: Any, case: Case) -> None:
    """One step of one mini-batch."""
    loss = benchmark.pedantic(prepare(case), rounds=20, warmup_rounds=3)
    assert loss.shape == () and bool(loss.isfinite())
