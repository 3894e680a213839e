"""Fixtures for tests of behaviours. The tests also run on the engine `ranks` (over processes)."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
