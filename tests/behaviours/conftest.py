"""Behaviours run on one more engine than other tests: `ranks`, a pipeline over processes (../ranks.py)."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
