"""Tests of transparency that take an engine take one more: `ranks`, a pipeline over processes (../ranks.py)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ..conftest import few

# What ranks do not do, and why.
LEFT_OUT = {
    "test_any_model[reused]": "a parameter of two partitions, which ranks refuse",
    "test_a_parameter_in_two_partitions_gets_the_same_bits_every_time": "likewise",
    "test_a_graph_that_a_layer_keeps": "other ranks do not have what a layer keeps",
    "test_an_auxiliary_loss_that_is_kept": "likewise",
    "test_every_component_can_be_switched_off": "ranks have no such components",
    "test_skips[through]": "likewise",
    "test_every_boundary[through]": "likewise",
    "test_a_pipeline_in_a_pipeline": "only one rank would run the inner one",
    "test_two_threads": "ranks have to run mini-batches in one order, and so cannot run two at once",
    "test_threads_that_draw_random_numbers": "likewise",
    "test_two_backwards_at_once": "likewise",
    "test_within_plain_checkpointing[True]": "ranks are tested by autograd.grad, which that kind refuses",
    "test_a_pipeline_within_plain_checkpointing": "each rank would run the forward again at a time of its own",
}


@pytest.fixture(params=["graph", "workers", "ranks"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def over_ranks(item: Any) -> bool:
    here = item.path.is_relative_to(Path(__file__).parent)
    return here and hasattr(item, "callspec") and item.callspec.params.get("engine") == "ranks"


def left_out(item: Any) -> bool:
    return any(f"{item.originalname}{case}" in LEFT_OUT for case in ("", *(f"[{x}]" for x in item.callspec._idlist)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Over ranks, leave out what they do not do; of the rest, run each pair of parameters, and not all combinations."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in filter(over_ranks, items):
        if not left_out(item):
            tests[item.nodeid.split("[")[0]].append(item)
    kept = {test for group in tests.values() for test in few(group)}
    config.hook.pytest_deselected(items=[item for item in items if over_ranks(item) and item not in kept])
    items[:] = [item for item in items if not over_ranks(item) or item in kept]
    for item in kept:
        item.add_marker("ranks")


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    if not any(map(over_ranks, items)):
        return []
    return ["not run over ranks:", *(f"    {name}: {why}" for name, why in LEFT_OUT.items())]
