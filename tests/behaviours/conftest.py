"""Fixtures of behaviours. They also run on the engine `ranks`, a pipeline over processes."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
