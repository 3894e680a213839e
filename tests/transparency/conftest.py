"""Every test of transparency that takes an engine takes one more: processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..ranks import RANKS, in_ranks


@pytest.fixture(params=["graph", "workers", "ranks"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not in_ranks(pyfuncitem):
        return None
    if failed := RANKS.run(pyfuncitem.nodeid):
        pytest.fail(failed, pytrace=False)
    return True


@pytest.fixture(scope="session", autouse=True)
def ranks_end() -> Iterator[None]:
    yield
    RANKS.close()
