"""Test the parts of `benchmarks.gpu` that run tests on CUDA, and a few rows of experiments."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import cuda_tests, several
from benchmarks.gpu.experiments import FEW_ROWS, few_rows
from benchmarks.gpu.part import RESULT, Context
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import ROOT


def context(folder: Path) -> Context:
    return Context("a part", "tiny", folder, deadline=0.0)


def test_tests_are_counted_as_they_end(tmp_path: Path) -> None:
    counting = cuda_tests.Counting(context(tmp_path))
    session = SimpleNamespace(items=[1, 2, 3, 4], shouldstop=False)
    counting.pytest_collection_finish(session)
    for name, when, ended in (
        ("a", "setup", "passed"),
        ("a", "call", "passed"),
        ("b", "setup", "skipped"),
        ("c", "call", "failed"),
        ("c", "teardown", "failed"),
    ):
        report: Any = SimpleNamespace(nodeid=f"tests/{name}", when=when)
        for each in cuda_tests.ENDS:
            setattr(report, each, each == ended)
        counting.pytest_runtest_logreport(report)

    result = json.loads((tmp_path / RESULT).read_text())
    assert cuda_tests.lines(result) == ["1 passed, 1 failed, 1 skipped, of 4 tests", "failed: c"]
    assert session.shouldstop == "no time is left"


def test_only_the_process_that_began_counts_tests(tmp_path: Path) -> None:
    """Check that a forked process, such as a rank of a test over ranks, does not count tests."""
    counting = cuda_tests.Counting(context(tmp_path), process=-1)
    report: Any = SimpleNamespace(nodeid="a", when="call", passed=True, failed=False, skipped=False)
    counting.pytest_runtest_logreport(report)
    assert not sum(counting.counts.values())


def test_a_file_of_tests_that_cannot_be_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that exit code 2 is an error, unless the tests were stopped for lack of time."""

    def ended(arguments: Any, plugins: Any) -> int:
        (plugin,) = plugins
        plugin.session = SimpleNamespace(items=[], shouldstop=stopped)
        return 2

    monkeypatch.setattr(pytest, "main", ended)
    stopped: Any = "no time is left"
    assert cuda_tests.run(context(tmp_path))["collected"] == 0
    stopped = False
    with pytest.raises(RuntimeError, match="pytest ended with exit code 2; see the log"):
        cuda_tests.run(context(tmp_path))


def test_the_other_tests_on_gpus_exist() -> None:
    for name in cuda_tests.OTHERS:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {function}(" in text or not function


def test_with_little_time_few_rows_run() -> None:
    assert few_rows("unet-speed", 30.0) == ["--row", "baseline", "--row", "pipeline-8"]
    assert few_rows("unet-speed", 300.0) == []
    for name, rows in FEW_ROWS.items():
        known = {row.name for row in EXPERIMENTS[name].scale("paper").rows}
        assert {*rows, *several.ROWS} <= known
