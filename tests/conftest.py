"""Settings, hooks and fixtures that all tests share, such as `--slow` and tests over ranks."""

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
    deadline=None,  # tests do not measure times
    derandomize=True,
    # This check measures time, and fails on a busy machine.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# PyTorch must count GPUs without starting CUDA. Processes that are forked after the start of CUDA
# cannot use CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# A shell makes programs in the background ignore SIGINT. Programs that tests start inherit this,
# and then Ctrl-C does not end them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        help="run also slow tests, and all triples of parameters' values, not all pairs",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, and tests whose pairs of parameter values are all in other tests, too.

    With `--slow`, keep slow tests, and look at triples of parameter values instead of pairs. Tests
    of behaviours with the engine "ranks" get the mark `ranks`, so that they run in several ranks.
    """
    slow, tests = config.getoption("slow"), defaultdict[tuple[str, int], list[Any]](list)
    for item in items:
        if ranks := over_ranks(item):
            item.add_marker("ranks")
        if slow or item.get_closest_marker("slow") is None:
            function, _, _ = item.nodeid.partition("[")
            size = 3 if slow and not ranks else 2
            tests[function, size].append(item)
    kept: set[Any] = set()
    for (_, size), group in tests.items():
        kept.update(few(group, size))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def over_ranks(item: Any) -> bool:
    """Return whether a test is in the folder `behaviours` and uses the engine "ranks"."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    engine = getattr(given.get("case"), "engine", given.get("engine"))
    behaviours = Path(__file__).parent / "behaviours"
    return engine == "ranks" and item.path.is_relative_to(behaviours)


def few(tests: list[Any], size: int) -> list[Any]:
    """Return a few of a function's tests, which cover all combinations of `size` parameters."""
    if len(tests) == 1 or len(tests[0].callspec.params) <= size:
        return tests
    rows = []
    for test in tests:
        # All tests with the same value of a parameter have the same object.
        row = {name: id(value) for name, value in test.callspec.params.items()}
        rows.append(row)
    return [tests[k] for k in covering(rows, size)]


def covering(rows: Sequence[Mapping[Any, Hashable]], size: int) -> set[int]:
    """Return the indices of a few rows that have all combinations of `size` values.

    A row is the dictionary of a test's parameters.

    The function always chooses the row with the most new combinations next. If several rows have
    the most, a fixed random order decides. Without this order, the value that varies slowest is
    always combined with the first values of the other parameters.
    """
    order = Random(0).sample(range(len(rows)), len(rows))
    having = defaultdict[Hashable, list[int]](list)  # by combination, the rows that have it
    for k in order:
        for combination in combinations(rows[k].items(), size):
            having[combination].append(k)
    new: Counter[int] = Counter()
    for holders in having.values():
        new.update(holders)
    chosen: set[int] = set()
    while having:
        best = max(order, key=new.__getitem__)
        chosen.add(best)
        for combination in combinations(rows[best].items(), size):
            new.subtract(having.pop(combination, ()))
    return chosen


STARTED = pytest.StashKey[Ranks]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker("ranks") for item in session.items):
        session.config.stash[STARTED] = Ranks(session.config, session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked with `ranks` in several processes, which are the ranks."""
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
    """Start each test with the same seed, and with one thread for PyTorch's operators."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def only_what_the_tests_make() -> Iterator[None]:
    """Assert that no threads of the module's tests remain after the tests.

    Garbage collection ignores objects from before the tests, so that it takes only milliseconds.
    """
    threads = {*threading.enumerate()}
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    assert_no_thread_more(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Skip tests that need torchvision if it cannot be imported.

    For example, a torchvision that was built for another PyTorch cannot be imported.
    """
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


# Parameters of a pipeline. A test takes `engine` and `checkpoint`, or it takes `way`, a dictionary
# with both keyword arguments of `GPipe`.


@pytest.fixture(params=["graph", "workers"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["always", "except_last", "never"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(engine: str, checkpoint: str) -> dict[str, Any]:
    return {"engine": engine, "checkpoint": checkpoint}
