"""Fixtures for tests of behaviours, which also run on the engine `ranks` (one process per partition)."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
