"""Fixtures for tests of what pipelines compute, on all engines: "graph", "workers" and "ranks"."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
