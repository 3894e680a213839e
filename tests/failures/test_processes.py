"""Check that a fault in one process soon makes all processes raise the expected errors.

The processes are forked from a process that has already imported torch, because this is faster than
to import torch in each process.
"""

import os
import re
import signal
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from reproduce.run.engines.launch import Launched
from torchgpipe.state.saves import Saves

from ..start import forking
from . import program
from .faults import PATIENCE, ROOM, SAY_NOTHING, SILENCE, all_stop, stops
from .rows import ROWS, Row

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals to processes")


DELAY = 10.0  # seconds


def started(k: int, link: Any, method: str, row: Row, folder: Path) -> None:
    """Train as rank `k`. If `k` is the rank with the fault, train in a child process.

    `method` says how this child is started. With "forkserver", there is no child: this process,
    which has been forked from a server, does the training. A fork of this process is safe, because
    it has not used autograd yet, which starts threads.
    """
    if method == "forkserver" or k != row.rank:
        program.train(k, link, row, folder)
        return
    context: Any = get_context(method)
    process = context.Process(target=program.train, args=(k, link, row, folder))
    process.start()
    process.join()


def with_room(row: Row) -> Row:
    """Return the test case, with a longer timeout for silent ranks if this machine is very busy.

    On a busy machine, a healthy process may get no CPU time for seconds. The other ranks must not
    mistake this process for a failed one.
    """
    load, _, _ = os.getloadavg()
    busy = load > 3 * (os.cpu_count() or 1)
    return replace(row, timeout=4 * SILENCE) if busy and row.timeout == SILENCE else row


METHODS: list[Any] = [(name, "forkserver") for name in ROWS]
METHODS += [
    ("raises outside", "fork"),
    pytest.param("raises outside", "spawn", marks=pytest.mark.slow),  # it has to import torch
]


@pytest.mark.quick(10)
@pytest.mark.parametrize("name, method", METHODS)
def test_what_all_see(name: str, method: str, tmp_path: Path) -> None:
    """Check that all ranks raise the expected errors, however `multiprocessing` starts them."""
    row = with_room(ROWS[name])
    count, own = (program.WORLD, row.rank) if row.engine == "ranks" else (1, 0)
    forking()
    launched = Launched(
        "forkserver", count, started, method, row, tmp_path, daemon=method == "forkserver"
    )
    links = launched.links

    def ended(k: int, expected: str) -> float:
        assert links[k].poll(PATIENCE), "it does not end"
        error, at = links[k].recv()
        assert re.match(expected or "$", error), error
        launched.processes[k].join(PATIENCE)
        printed = (tmp_path / f"{k}.errors").read_text()
        causes = printed.count("The above exception was the direct cause")
        errors = 1 if error and not error.startswith("SystemExit") else 0
        assert printed.count("Traceback") - causes == errors, printed
        return float(at)

    def send(number: int) -> None:
        told = launched.processes if row.does is all_stop else [launched.processes[own]]
        for process in told:
            os.kill(process.pid, number)

    with closing(launched):
        assert links[own].poll(5 * PATIENCE)  # the process can have to import torch first
        _, begin = links[own].recv()
        if row.does is all_stop:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                send(number)
                time.sleep(1.5 * row.timeout)
        for k in {*range(count)} - {own}:
            end = ended(k, row.others and f"RankFailed: {row.others}")
            # On a busy machine, other programs delay this by some seconds: one run took 5.3 s.
            waited = 0 if row.timeout == ROOM else row.timeout
            assert end - begin < waited + DELAY or not row.others
        if row.does is stops:
            send(signal.SIGCONT)
        if row.does not in SAY_NOTHING:
            ended(own, row.own)
    if row.place == "saving":
        assert Saves(tmp_path / "saves").load(
            program.pipeline(replace(row, engine="graph")), None
        ) == {"step": 1}
        assert row.engine == "ranks" or not [*tmp_path.glob("saves/part-*")]
