"""Options (such as `--slow`), hooks and fixtures for all tests, also for tests over ranks."""

import gc
import importlib
import os
import signal
import subprocess
import sys
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
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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

# Let PyTorch count GPUs without starting CUDA. Otherwise the processes that tests fork could not
# use CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

ROOT = Path(__file__).parent.parent
PYTORCH_2_11 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""Whether this is PyTorch 2.11, the oldest version with which the tests run."""
ALONE = "TORCHGPIPE_TEST_RUNS_ALONE"
"""The environment variable that is set in a process which runs only one test."""

# A shell that runs pytest in the background makes it ignore SIGINT (Ctrl-C). The programs that
# tests start would inherit this. So restore the usual handler, because some tests end programs by
# SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def seed_the_cpu(seed: int) -> torch.Generator:
    """Seed the random generator of the CPU, and return it, as `torch.manual_seed` does.

    `torch.manual_seed` also keeps a stack trace for each kind of device that has not been used yet.
    With the deep stacks of tests, these traces took a third of the time of all tests.
    """
    generator: torch.Generator = vars(torch.random)["default_generator"]  # maybe a test's own
    return generator.manual_seed(seed)


if not torch.cuda.is_available():
    torch.manual_seed = torch.random.manual_seed = seed_the_cpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        help="run also slow tests, and all rows with a default device and on simulated devices",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run also all rows on all engines in all modes, and all triples of parameters' values",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.option.slow |= config.option.all


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose which of the collected tests run, and in which order.

    - Without `--slow`, slow tests do not run.
    - A parametrized test runs with only some combinations of its parameters' values. They are
      chosen so that each pair of values of two parameters occurs in at least one combination. With
      `--all`, each triple of values of three parameters occurs.
    - Without `--slow`, at most n combinations run if the test has the mark `quick(n)`.
    - Tests in tests/behaviours with the engine "ranks" get the mark `ranks`, so that they run in
      several processes.
    - Files that have only slow tests come first. So if several pytest processes share the tests, no
      process has a slow test left at the end.
    """
    slow = config.getoption("slow")
    every = config.getoption("all")
    tests = defaultdict[tuple[str, int], list[Any]](list)
    for item in items:
        # Plans are measured while other tests run; what a test expects does not depend on times.
        item.add_marker(pytest.mark.filterwarnings("ignore:other programs used"))
        if ranks := over_ranks(item):
            item.add_marker("ranks")
        if slow or item.get_closest_marker("slow") is None:
            function, _, _ = item.nodeid.partition("[")
            size = 3 if every and not ranks else 2
            tests[function, size].append(item)
    kept: set[Any] = set()
    for (_, size), group in tests.items():
        chosen = few(group, size, quick=not every)
        limit = group[0].get_closest_marker("quick")
        if limit is not None and not slow:
            chosen = Random(0).sample(chosen, min(len(chosen), *limit.args))
        kept.update(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    quick_files = {item.path for item in items if item.get_closest_marker("slow") is None}
    items.sort(key=lambda item: item.path in quick_files)


def over_ranks(item: Any) -> bool:
    """Return whether a test is in tests/behaviours and uses the engine "ranks"."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    engine = getattr(given.get("case"), "engine", given.get("engine"))
    behaviours = Path(__file__).parent / "behaviours"
    return engine == "ranks" and item.path.is_relative_to(behaviours)


def few(tests: list[Any], size: int, *, quick: bool) -> list[Any]:
    """Choose a few of the parametrized tests of a function.

    With `size` 2, for any two parameters of the function, each pair of their values occurs in a
    chosen test. With `size` 3, each triple of values does. There is one exception: if the function
    has the mark `apart(a, b)` and `quick` is true, pairs of a value of a and a value of b can be
    missing.
    """
    if len(tests) == 1 or len(tests[0].callspec.params) <= size:
        return tests
    apart = tests[0].get_closest_marker("apart") if quick else None
    chosen: set[int] = set()
    for without in apart.args if apart else [""]:
        rows = []
        for test in tests:
            given = test.callspec.params
            # All tests with the same value of a parameter have the same object.
            rows.append({name: id(given[name]) for name in given if name != without})
        chosen |= covering(rows, size)
    return [tests[k] for k in sorted(chosen)]


def covering(rows: Sequence[Mapping[Any, Hashable]], size: int) -> set[int]:
    """Choose a few tests that together have all combinations of values; return their indices.

    Each time, the test with the most new combinations is chosen. If several tests have equally
    many, a fixed random order decides, so that no value is mostly combined with the first values of
    other parameters.

    Args:
        rows: For each test, a mapping from the names of its parameters to their values.
        size: The number of values in a combination. With 2, each pair of values that occurs in a
            test also occurs in a chosen test.
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
    # All objects that exist now live until the end of the test run. `gc.freeze` makes garbage
    # collections skip them, so that a collection takes only milliseconds.
    gc.collect()
    gc.freeze()
    if any(item.get_closest_marker("ranks") for item in session.items):
        session.config.stash[STARTED] = Ranks(session.config, session.items)
    # The first backward of a process starts a thread for each GPU. After that, no process that is
    # forked from it can run a backward. PyTorch counts the GPUs that `FakeTensorMode` simulates,
    # too. So run a backward before tests simulate GPUs and fork processes.
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


def run_alone(test: pytest.Function) -> None:
    """Run a test in a separate process, and fail if the test fails there."""
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    command += [f"--{option}" for option in ("slow", "all") if test.config.getoption(option)]
    env = os.environ | {ALONE: "1"}
    ran = subprocess.run([*command, test.nodeid], env=env, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        pytest.fail(f"{ran.stdout}\n{ran.stderr}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark `ranks` in several processes.

    PyTorch 2.11 can crash if a process compiles layers in one thread, and then other layers in
    another thread (docs/works-with.md says so). With this version, a test whose threads compile
    layers runs in a separate process.
    """
    in_threads = "compile" in pyfuncitem.nodeid and "workers" in pyfuncitem.nodeid
    if PYTORCH_2_11 and in_threads and ALONE not in os.environ:
        run_alone(pyfuncitem)
        return True
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
    """Start each test with the same random seed, and with one thread for PyTorch's operators."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_dispatch_mode_is_left() -> Iterator[None]:
    """Assert that a test does not let PyTorch believe that a `TorchDispatchMode` is still active.

    PyTorch keeps this in variables that all threads share. If several threads enter and leave modes
    at the same time, the variables can keep wrong values, which change later tests.
    """
    yield
    assert not is_in_torch_dispatch_mode()


@pytest.fixture(scope="module")
def only_what_the_tests_make() -> Iterator[None]:
    """Assert that the tests of a module leave no threads behind."""
    threads = {*threading.enumerate()}
    gc.collect()
    yield
    gc.collect()
    assert_no_thread_more(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Skip a test that fails because torchvision cannot be imported.

    For example, torchvision may have been built for another version of PyTorch.
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


# Fixtures for two options of a pipeline: its engine and its mode of checkpointing. A test uses the
# fixtures `engine` and `checkpoint`, or the fixture `way`, which is a dictionary with both options.


@pytest.fixture(params=["graph", "workers"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["always", "except_last", "never"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(engine: str, checkpoint: str) -> dict[str, Any]:
    return {"engine": engine, "checkpoint": checkpoint}
