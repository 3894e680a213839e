"""The fixture `engine`, which runs a test once with each engine that `GPipe` can use."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
