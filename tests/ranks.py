"""Processes that run a test together. Each is a rank of `torch.distributed`.

Pytest's own process forks the ranks after it has collected all tests, so that ranks know the tests.
The ranks live until pytest's process ends. A test runs in three steps:

1. Pytest's process tells the ranks which test is next.
2. Each rank runs the test with its fixtures, and reports the result. With the mark `ranks(n)`, only
   the first n ranks run the test. With the mark `ranks`, the test itself chooses the number of
   ranks, by calling `Rank.join`.
3. During the test, ranks send messages to each other by `Rank.exchange`. The messages go through
   pytest's process, which therefore notices if a rank waits for a message that never comes.

Each rank prints to its own file. If a rank hangs or dies, the test fails. The test's error message
shows the ends of these files, which have the stack of each thread.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from reproduce.run.engines.launch import Ended, Launched
from torchgpipe.distributed.liveness.ending import open_connections

from .gpus import DEVICES

WORLD = max(4, min(8, DEVICES))
"""The number of ranks. With eight GPUs, each rank can have one."""
PATIENCE = 180  # seconds; only a test that hangs takes so long, also on a busy machine
LAST = 5000
"""How many characters of what a rank has printed are shown."""


class Ranks:
    """All processes that run tests over ranks. The object is used in pytest's own process.

    The object starts the ranks, runs tests on them, and ends them.

    Attributes:
        launched: The processes of the ranks, and the connections to these processes.
    """

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        # Do two things before processes are forked: import this module, which takes seconds, and
        # make pytest's temporary folder, because otherwise each process makes its own folder.
        importlib.import_module("torch._dynamo")
        folder = config._tmp_path_factory.mktemp("ranks")  # type: ignore[attr-defined]
        self._index = {item.nodeid: k for k, item in enumerate(items)}
        self._files = [folder / f"rank-{k}.txt" for k in range(WORLD)]
        self._ended = ""
        with warnings.catch_warnings():
            # Python warns of forks if there are threads. The threads of BLAS do nothing now.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.launched = Launched("fork", WORLD, serve, config, items, self._files)

    def run(self, test: str) -> str:
        """Run a test on all ranks.

        Returns:
            The errors of the ranks on which the test failed, or "" if it passed on all ranks.
        """
        if self._ended:
            return self._ended
        told: dict[int, str] = {}
        offered: dict[int, tuple[int, bytes]] = {}
        self.launched.send(self._index[test])
        while len(told) < WORLD:
            received = self._receive({*range(WORLD)} - {*told} - {*offered})
            if not received:
                return self._end(f"nothing happened for {PATIENCE} s in {test}", told)
            for k, said in received:
                if isinstance(said, Ended):
                    return self._end(f"a rank's process ended {said.how} in {test}", told)
                if isinstance(said, str):
                    told[k] = said
                else:
                    offered[k] = said
            self._answer(offered, told)
        return _said(told)

    def _receive(self, busy: set[int]) -> list[tuple[int, Any]]:
        """Wait for messages of ranks."""
        # Wait a second at a time. So time does not count while all processes are stopped.
        for _ in range(PATIENCE):
            if received := [*self.launched.receive(busy, 1)]:
                return received
        return []

    def _answer(self, offered: dict[int, tuple[int, bytes]], told: dict[int, str]) -> None:
        """Answer the ranks that wait in `Rank.exchange`.

        If all ranks of the exchange wait, send the values of all ranks to each of them. If a rank
        of the exchange has already ended the test, send `None`.
        """
        if not offered:
            return
        ranks = range(max(n for n, _ in offered.values()))
        complete = offered.keys() == {*ranks}
        if not complete and told.keys().isdisjoint(ranks):
            return
        self.launched.send([offered[each][1] for each in ranks] if complete else None, offered)
        offered.clear()

    def _end(self, why: str, told: dict[int, str]) -> str:
        """End the processes of all ranks, because one of them hangs or has died.

        Args:
            why: What went wrong.
            told: Maps ranks to the errors that they have reported.

        Returns:
            An error with `why`, the reported errors, and what each process printed last.
        """
        for process in self.launched.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        self.launched.close()
        self._ended = f"earlier, {why}"
        return "\n".join([why, *map(end_of, self._files), _said(told)])


def end_of(file: Path) -> str:
    """Return the last lines of a file, after a line with its path."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return f"{file} ends with:\n{text[-LAST:]}"


def _said(told: dict[int, str]) -> str:
    return "\n".join(f"on rank {index}:\n{text}" for index, text in sorted(told.items()) if text)


class Rank:
    """One of the processes that run tests over ranks. The object is used in this process only.

    A test calls the methods, for example to make a process group or to exchange values with other
    ranks.

    Attributes:
        file: The file to which this process prints.
    """

    file: Path

    def __init__(self, index: int, link: Connection) -> None:
        self.index, self._link = index, link
        self._received: SimpleQueue[Any] = SimpleQueue()
        self._failed: list[str] = []
        self._left = self._joined = False
        self._used: dict[int, Any] = {}
        self._store: Any = None
        self._test = 0

    def __reduce__(self) -> Any:
        return current, ()  # a copy of this object is the object itself

    def serve(
        self, config: pytest.Config, items: Sequence[pytest.Item], files: Sequence[Path]
    ) -> NoReturn:
        """Run, as one rank, the tests that pytest's process asks for, until that process ends.

        What the tests print goes to this rank's file.
        """
        gc.freeze()
        # The test run receives the signal, too. It then ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.file = files[self.index]
        output = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, 2)
        threading.Thread(target=self._listen, daemon=True).start()
        for name, plugin in config.pluginmanager.list_name_plugin():
            of_xdist = type(plugin).__name__ == "WorkerInteractor"
            if of_xdist or name in ("terminalreporter", "capturemanager"):
                config.pluginmanager.unregister(name=name)
        config.pluginmanager.register(self)
        while True:
            self._test = self._received.get()
            self._store = self._store or self._meet()
            self._link.send(self._run(config, items[self._test]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's failure."""
        if report.failed:
            self._failed.append(report.longreprtext)

    def join(self, n: int) -> None:
        """Make a process group of the first n ranks, unless the test has already made one.

        On all other ranks, this method ends the test.
        """
        if self.index >= n:
            self._left = True
            pytest.skip("this rank takes no part in the test")
        self._joined = True
        if dist.is_initialized():
            same = dist.get_world_size() == n
            assert same, "all pipelines of a test have to have equally many partitions"
            return
        assert n <= WORLD, f"there are {WORLD} ranks"
        store = dist.PrefixStore(str(self._test), self._store)  # type: ignore[attr-defined]
        patience = timedelta(seconds=PATIENCE / 2)
        store.set_timeout(patience)  # shorter than PATIENCE, so that a hanging test says where
        dist.init_process_group(
            "gloo", store=store, rank=self.index, world_size=n, timeout=patience
        )
        # A rank that has nothing more to do must not leave while another rank still connects.
        dist.barrier()

    def use(self, pipeline: Any) -> None:
        """Remember a pipeline, to close it when the test ends."""
        self._used[id(pipeline)] = pipeline

    def exchange(self, n: int, value: Any) -> list[Any]:
        """Send a value to the first n ranks, and return their values."""
        with torch.device("cpu"):  # a test can have another default device
            self._link.send((n, pickle.dumps(value)))
            found = self._received.get()
            assert found is not None, "another rank has ended the test"
            return [pickle.loads(each) for each in found]

    def agreed(self, n: int, case: Any, run: Callable[[Any], Any]) -> Any:
        """Return the result of `run(case)`, or raise an error if any of the first n ranks fails.

        Each of these ranks must call this method with the same case.
        """
        result, error = None, ""
        try:
            result = run(case)
        except Exception:
            error = traceback.format_exc()
        self._close(failed=bool(error))
        found: list[Any] = [None]
        # Other ranks can still wait for this rank in another exchange.
        while not all(type(each) is list for each in found):
            found = self.exchange(n, [repr(case), error])
        errors = {}
        for index, (drawn, raised) in enumerate(found):
            assert drawn == repr(case), "ranks have drawn different cases"
            errors[index] = raised
        said = _said(errors)
        assert not said, said
        return result

    def _close(self, *, failed: bool) -> None:
        """Close the test's pipelines and connections."""
        if failed:
            for connections in [*open_connections]:
                connections.abort()  # without this, other ranks wait for this rank
        for pipeline in self._used.values():
            pipeline.close()
        self._used.clear()
        for connections in [*open_connections]:
            connections.close()  # without this, the connections are still monitored

    def _run(self, config: pytest.Config, item: pytest.Item) -> str:
        """Run a test. Return its errors, or "" if it passed."""
        self._failed, self._left, self._joined = [], False, False
        try:
            config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        except BaseException as error:
            self._failed.append(repr(error))
        told = "" if self._left else "\n".join(self._failed)
        self._close(failed=bool(told))
        if dist.is_initialized():
            dist.destroy_process_group()
        elif not self._left and not self._joined and not told:
            told = "the test made no pipeline over ranks"
        return told

    def _listen(self) -> NoReturn:
        # This runs in its own thread, so that the process ends even if the main thread is busy.
        while True:
            try:
                self._received.put(self._link.recv())
            except (EOFError, ConnectionError):  # noqa: PERF203 - only this ends the loop
                os._exit(0)

    def _meet(self) -> Any:
        """Return a `TCPStore` that all ranks share."""
        tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
        own = tcp("127.0.0.1", 0, WORLD, True, wait_for_workers=False) if self.index == 0 else None
        port = self.exchange(WORLD, own and own.port)[0]
        return own or tcp("127.0.0.1", port, WORLD)


_current: Rank | None = None


def serve(index: int, link: Connection, *given: Any) -> None:
    """Run tests in this process, as rank `index`."""
    global _current
    _current = Rank(index, link)
    _current.serve(*given)


def current() -> Rank:
    """Return the `Rank` of this process."""
    assert _current is not None, "only tests marked with `ranks` run over ranks"
    return _current


def is_rank() -> bool:
    """Return whether this process is a rank."""
    return _current is not None
