"""Every row of rows/ with every engine and mode: what a pipeline does is what its layers do, or it refuses."""

from __future__ import annotations

import pytest

from .row import Case, cases, check
from .rows import between, buffers, gradients, in_place, modes, norms, passed, random, skips, split, unusual

GROUPS = (split, passed, skips, in_place, gradients, between, buffers, modes, random, norms, unusual)
NAMES = {row: f"{group.__name__.split('.')[-1]}: {row.name}" for group in GROUPS for row in group.ROWS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = cases([*NAMES], every=metafunc.config.getoption("slow"))
    metafunc.parametrize("case", chosen, ids=lambda case: "-".join((NAMES[case.row], *filter(None, case[1:]))))


# Of a reentrant checkpoint in a first pass, which has no graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
# Before torch 2.13, what `checkpoint` holds is not closed where the layer raises, but wherever the error is freed.
@pytest.mark.filterwarnings("ignore:.*_checkpoint_without_reentrant:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_rows(case: Case) -> None:
    check(*case)
