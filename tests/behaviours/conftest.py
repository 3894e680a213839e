"""Behaviours also run on the engine `ranks`, a pipeline over processes (../ranks.py), unlike other tests."""

import pytest

from .row import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
