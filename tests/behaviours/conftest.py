"""Behaviours run on one more engine than other tests: `ranks`, a pipeline over processes (../ranks.py)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ..conftest import few
from .row import ENGINES, Case

# What ranks do not do, and why; rows say it themselves.
LEFT_OUT = {
    "test_any_model[reused]": "a parameter of two partitions, which ranks refuse",
    "test_a_graph_that_a_layer_keeps": "other ranks do not have what a layer keeps",
    "test_a_pipeline_in_a_pipeline": "only one rank would run the inner one",
    "test_two_threads": "ranks have to run mini-batches in one order, and so cannot run two at once",
    "test_threads_that_draw_random_numbers": "likewise",
    "test_two_backwards_at_once": "likewise",
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def over_ranks(item: Any) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    engine = given["case"].engine if isinstance(given.get("case"), Case) else given.get("engine")
    return item.path.is_relative_to(Path(__file__).parent) and engine == "ranks"


def left_out(item: Any) -> bool:
    return over_ranks(item) and any(
        f"{item.originalname}{case}" in LEFT_OUT for case in ("", *(f"[{x}]" for x in item.callspec._idlist))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot be; over ranks run each pair of parameters, and not all combinations."""
    tests: dict[str, list[Any]] = defaultdict(list)
    dropped = {item for item in items if left_out(item)}
    for item in items:
        if over_ranks(item) and item not in dropped:
            tests[item.nodeid.split("[")[0]].append(item)
    kept = {test for group in tests.values() for test in few(group)}
    dropped |= {item for item in items if over_ranks(item)} - kept
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]
    for item in kept:
        item.add_marker("ranks")
