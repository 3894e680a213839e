"""Run the tests on CUDA: tests/test_cuda*.py, and the tests in other files that need a GPU."""

import os
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.part import Context, Fields
from reproduce.machine.description import ROOT

PURPOSE = "whether the tests on CUDA pass"
SHARE = 4
NEEDS = ("pytest", "hypothesis")

ENDS = ("passed", "failed", "skipped")
OTHERS = (
    "tests/library/test_module_copies.py::test_blocks_on_gpus_have_buffers_on_their_gpus",
    "tests/library/plan/predict/test_profiled.py::test_on_a_gpu",
    "tests/library/task/test_batchnorm.py",
)
"""Tests that need a GPU, or that also run on one, in other files."""


@dataclass(eq=False)  # pytest puts its plugins into sets
class Counting:
    """A plugin of pytest that counts how tests end, and stops pytest when no time is left.

    The plugin writes the counts to a file after each test that has passed or failed. Tests over
    ranks run in processes that are forked from this one; only this process counts.

    Attributes:
        context: The context of the measurement, whose `write` writes the counts to the file.
        session: The session of pytest, which has the collected tests.
        counts: The numbers of tests that passed, failed and were skipped.
        failed: The names of the tests that failed.
        process: The id of the process that counts.
    """

    context: Context
    session: Any = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    failed: list[str] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def pytest_collection_finish(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test as passed, skipped or failed. If its fixture fails, the test has failed."""
        if os.getpid() != self.process:
            return
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
            self.counts["failed"] += 1
        elif report.passed and report.when == "call":
            self.counts["passed"] += 1
        else:
            self.counts["skipped"] += report.skipped
            return  # a kill would lose nothing that was found out
        self.context.write(self.result())
        if self.context.seconds_left() < 0:
            self.session.shouldstop = "no time is left"

    def result(self) -> Fields:
        """Return how many tests were collected, passed, failed or skipped, and which failed."""
        collected = len(self.session.items)
        return {"collected": collected, **self.counts, "failed tests": self.failed}


def run(context: Context) -> Fields:
    """Run the tests in this process; what they print goes to the log of this part (measurement)."""
    import pytest

    counting = Counting(context)
    files = sorted(ROOT.glob("tests/test_cuda*.py"))
    arguments = [
        *map(str, files),
        *[str(ROOT / name) for name in OTHERS],
        f"--rootdir={ROOT}",
        "-c",
        str(ROOT / "setup.cfg"),
        "--override-ini=addopts=--import-mode=importlib",  # without options of plugins
        "--verbose",
        "--slow",
        "-p",
        "no:cacheprovider",
    ]
    code = pytest.main(arguments, plugins=[counting])
    session = counting.session
    # 1 means that tests failed, and 2 that they were stopped: because no time is left, or because a
    # file could not be imported.
    if session is None or code not in (0, 1, 2) or (code == 2 and not session.shouldstop):
        raise RuntimeError(f"pytest ended with exit code {int(code)}; see the log")
    return counting.result()


def lines(result: Fields) -> list[str]:
    """Say how many tests passed, and which failed."""
    counts = [f"{result[end]} {end}" for end in ENDS]
    said = [f"{', '.join(counts)}, of {result['collected']} tests"]
    failed = result["failed tests"]
    if failed:
        names = [name.removeprefix("tests/") for name in failed]
        said.append(f"failed: {', '.join(names[:5])}{' and more' if names[5:] else ''}")
    return said
