"""Cases: what the suites and the regression time. Every one of them trains."""

from __future__ import annotations

import pytest

from reproduce.regression.cases import CASES, TRAINING, Case, prepare


@pytest.mark.parametrize("model", ["AmoebaNet-D", "U-Net"])
def test_the_three_configurations_at_equal_batch_size(model: str) -> None:
    naive, checkpoint_only, gpipe = (case for case in TRAINING if case.model == model)
    assert (naive.n, naive.m, naive.checkpoint) == (2, 1, "never")
    assert (checkpoint_only.n, checkpoint_only.m, checkpoint_only.checkpoint) == (1, gpipe.m, "always")
    assert (gpipe.n, gpipe.checkpoint) == (2, "except_last") and gpipe.m > 1
    assert naive.batch == checkpoint_only.batch == gpipe.batch
    assert sum(naive.balance) == sum(checkpoint_only.balance) == sum(gpipe.balance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_trains(case: Case) -> None:
    assert [each.name for each in CASES].count(case.name) == 1
    step = prepare(case)
    first, second = float(step()), float(step())
    assert first != second, "the optimizer moved the parameters"
    assert float(prepare(case)()) == first, "both sides start from the same parameters and data"
