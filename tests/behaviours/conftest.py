"""The fixture `engine`, for tests that run on all engines."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
