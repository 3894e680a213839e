"""What all tests take for granted: `--slow`, `ranks`, pairs of parameters, generated cases, and a Ctrl-C."""

import gc
import importlib
import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from .library.ledger import assert_no_thread_more
from .ranks import Ranks, current, is_rank

settings.register_profile(
    "suite",
    deadline=None,  # nothing about them is timed: that is for benchmarks
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow
    ],  # it looks at the clock, and a busy machine would fail it
)
settings.load_profile("suite")

# To ask how many GPUs there are must not start CUDA, which does not work in processes that are forked after that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# A shell lets what it starts in the background ignore it; programs started by tests would, too, and go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        help="run also slow tests, and all triples of parameters' values, not all pairs",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of parameters whose pairs are in others (with `--slow`: triples), and slow tests.

    Behaviours run over ranks where their engine is called so.
    """
    slow, tests = config.getoption("slow"), defaultdict[tuple[str, int], list[Any]](list)
    for item in items:
        if ranks := over_ranks(item):
            item.add_marker("ranks")
        if slow or item.get_closest_marker("slow") is None:
            tests[item.nodeid.split("[")[0], 3 if slow and not ranks else 2].append(item)
    kept = {test for (_, size), group in tests.items() for test in few(group, size)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def over_ranks(item: Any) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    engine = getattr(given.get("case"), "engine", given.get("engine"))
    return item.path.is_relative_to(Path(__file__).parent / "behaviours") and engine == "ranks"


def few(tests: list[Any], size: int) -> list[Any]:
    """Of one function's tests, return some that have all combinations of `size` values."""
    if len(tests) == 1 or len(tests[0].callspec.params) <= size:
        return tests
    # A parameter's value is the same object in all tests that have it.
    return [
        tests[k]
        for k in covering(
            [{name: id(x) for name, x in t.callspec.params.items()} for t in tests], size
        )
    ]


def covering(rows: Sequence[Mapping[Any, Hashable]], size: int) -> set[int]:
    """Return the indices of a few rows that have all combinations of `size` values which any row has.

    The row with the most new ones comes first. Ties are drawn, the same in every run, or whatever varies slowest
    would always be combined with the first of all others.
    """
    order = Random(0).sample(range(len(rows)), len(rows))
    having = defaultdict[Hashable, list[int]](list)  # a combination -> the rows that have it
    for k in order:
        for combination in combinations(rows[k].items(), size):
            having[combination].append(k)
    new = Counter(k for holders in having.values() for k in holders)
    chosen: set[int] = set()
    while having:
        chosen.add(best := max(order, key=new.__getitem__))
        for combination in combinations(rows[best].items(), size):
            new.subtract(having.pop(combination, ()))
    return chosen


STARTED = pytest.StashKey[Ranks]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if (
        any(item.get_closest_marker("ranks") for item in session.items)
        and not session.config.option.collectonly
    ):
        session.config.stash[STARTED] = Ranks(session.config, session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are marked with `ranks` there."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    if is_rank():
        for n in marker.args:
            current().join(n)
        return None
    if failed := pyfuncitem.config.stash[STARTED].run(pyfuncitem.nodeid):
        pytest.fail(failed, pytrace=False)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if STARTED in config.stash:
        config.stash[STARTED].launched.close()


@pytest.fixture(autouse=True)
def alike() -> None:
    """Begin with one seed, and keep the operators of tiny layers from waiting for threads of their own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def only_what_the_tests_make() -> Iterator[None]:
    """Set aside what is there already, so that a collection takes milliseconds; of all that is made no thread stays."""
    threads = {*threading.enumerate()}
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    assert_no_thread_more(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Skip what needs torchvision where that cannot be imported, such as beside a PyTorch of another build."""
    try:
        return (yield)
    except Exception as error:
        try:
            importlib.import_module("torchvision")
        except Exception as why:
            if str(why) in str(error):
                pytest.skip(f"torchvision cannot be imported: {why}")
        raise


pytest_runtest_call = pytest_runtest_setup


# How a pipeline runs. A test takes `engine` and `checkpoint`, or both as `way`: keyword arguments of `GPipe`.


@pytest.fixture(params=["graph", "workers"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["always", "except_last", "never"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(engine: str, checkpoint: str) -> dict[str, Any]:
    return {"engine": engine, "checkpoint": checkpoint}
