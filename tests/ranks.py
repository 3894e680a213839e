"""Run tests whose engine is `ranks` in several processes at once, which live as long as the test run.

Each process is a rank, and a pytest of its own that has collected the same tests. The test run tells all of them which
test is next; each runs it, its fixtures too. It fails if it fails on any rank.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

WORLD = 4
ROOT = Path(__file__).parents[1]
PATIENCE = 60  # seconds; only a hang takes as long


class Ranks:
    """The processes, started when the first test needs them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, test: str) -> str | None:
        """Run a test on all ranks; return what the first rank that failed has to say."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{test}\n".encode())
            process.stdin.flush()
        told = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            try:
                told.append(pickle.load(process.stdout))
            except EOFError:
                self.close()
                return f"rank {rank} has ended while it ran {test}"
        return next((f"on rank {rank}:\n{text}" for rank, text in enumerate(told) if text), None)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(WORLD):
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks"],
                    cwd=ROOT,
                    env={**os.environ, **environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )


RANKS = Ranks()


class Rank:
    """What makes a pytest one of the processes."""

    def __init__(self, tests: Any, answers: Any) -> None:
        self._tests, self._answers = tests, answers

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
        items = {item.nodeid: item for item in session.items}
        for line in self._tests:
            item = items[line.strip()]
            self._failed: list[str] = []
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            pickle.dump("\n".join(self._failed), self._answers)
            self._answers.flush()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.longreprtext)


def in_ranks(item: pytest.Function) -> bool:
    """Return whether a test is one that ranks run, and this is not one of them."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("engine") == "ranks" and "RANK" not in os.environ


def main() -> None:
    tests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print must not come between the answers
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2) if os.environ["RANK"] != "0" else None
    with suppress(KeyboardInterrupt):
        pytest.main(["tests/transparency", "--slow", "-q", "-p", "no:cacheprovider"], plugins=[Rank(tests, answers)])


if __name__ == "__main__":
    main()
