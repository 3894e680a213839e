"""The processes of the soak: forked from one that has imported PyTorch and started no thread, and told what to train.

A process that is forked takes milliseconds; one that imports PyTorch takes two seconds of a core.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch.distributed as dist

from benchmarks.child import die_with_parent
from benchmarks.soak_plan import RANKS, Episode
from benchmarks.soak_reports import Report
from benchmarks.soak_training import Seat, train_undisturbed
from benchmarks.two_machines import NAMES, Link, move_to


class Order(NamedTuple):
    """What a process is to do: an attempt of an episode, or, where that is `None`, the whole of it undisturbed."""

    episode: Episode
    attempt: int | None
    folder: Path


class Process:
    """A process that does what it is told.

    Args:
        rank: its number, or `None` for the one that trains undisturbed.
        log: where what it prints goes.
        kept: whether it goes on when an order is done, or has failed.
        apart: whether it is in a network of its own, of `Networks`.
    """

    running: ClassVar[set[Process]] = set()

    def __init__(self, rank: int | None, log: Path, *, kept: bool, apart: bool = False) -> None:
        self.ended: float | None = None
        theirs, self._orders = Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if not self.pid:
            try:  # this process must never go on as a second soak
                for other in (*Process.running, self):
                    other._orders.close()
                if apart and rank is not None:
                    move_to(NAMES[rank])
                    os.environ["GLOO_SOCKET_IFNAME"] = "link"
                _serve(rank, theirs, log, kept)
            finally:
                os._exit(3)
        theirs.close()
        Process.running.add(self)

    def tell(self, order: Order) -> None:
        """Let the process do something."""
        self._orders.send(order)

    def alive(self) -> bool:
        """Return whether the process has not ended; `ended` says when this was first seen."""
        if self.ended is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._over()
        return self.ended is None

    def end(self) -> None:
        """End the process."""
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._over()

    def _over(self) -> None:
        self.ended = time.monotonic()
        self._orders.close()
        Process.running.discard(self)


class Networks:
    """A network for each rank. Another process joins them: that takes threads, and the soak, which forks, has none."""

    def __init__(self) -> None:
        theirs, self._cut = Pipe(duplex=False)
        made, say_made = Pipe(duplex=False)
        if not os.fork():
            try:
                _prepare()
                link = Link(networks=RANKS)
                say_made.send(True)
                while True:
                    link.cut = theirs.recv()
            finally:
                os._exit(3)
        say_made.close()
        made.recv()

    def cut(self, *ranks: int) -> None:
        """Carry nothing any more to and from these ranks, and everything to and from others."""
        self._cut.send({*ranks})


class Crew:
    """The processes that are kept from episode to episode, made when first needed, and anew where one has ended.

    Attributes:
        networks: for ranks whose links are cut; `None` where there can be none.
    """

    def __init__(self, folder: Path, networks: Networks | None) -> None:
        self.networks = networks
        importlib.import_module("torch._dynamo")  # an optimizer's first step does so, for seconds; here only once
        self._folder = folder
        self._made: dict[int | None, Process] = {}
        self._lives: dict[int | None, int] = defaultdict(int)

    def __getitem__(self, rank: int | None) -> Process:
        if rank not in self._made or not self._made[rank].alive():
            self._made[rank] = Process(rank, self._folder / f"kept {rank}.log", kept=True)
            self._lives[rank] += 1
        return self._made[rank]

    def life(self, rank: int | None) -> int:
        """Return how often a process has been made."""
        return self._lives[rank]

    def end(self) -> None:
        """End the ranks, and not the process that trains undisturbed."""
        for rank, process in self._made.items():
            if rank is not None:
                process.end()

    def close(self) -> None:
        """End all processes of the soak."""
        for process in [*Process.running]:
            process.end()


def _serve(rank: int | None, orders: Connection, log: Path, kept: bool) -> NoReturn:
    _prepare()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    seat: Seat | None = None
    while True:
        try:
            order: Order = orders.recv()
        except EOFError:
            os._exit(0)
        attempt, folder = order.attempt, order.folder
        if rank is None or attempt is None:
            report = Report(folder / "reference")
            done = _ended_well(partial(train_undisturbed, order.episode, report), report)
        else:
            if seat is None or seat.folder != folder:
                seat = Seat(order.episode, folder)
            _meet(order, rank)
            report = Report(folder / f"{attempt}.{rank}")
            done = _ended_well(partial(seat.train, attempt, report), report, seat)
        if not kept:
            os._exit(not done)
        gc.collect()
        report("use", use=use())
        report.close()


def _meet(order: Order, rank: int) -> None:
    """Make the process group of an attempt, unless it is that of the attempt before."""
    number, attempts = order.attempt or 0, order.episode.attempts
    n = len(attempts[number].balance)
    if number and dist.is_initialized() and n == len(attempts[number - 1].balance):
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    file_store: Any = dist.FileStore  # type: ignore[attr-defined]
    store = file_store(str(order.folder / f"meeting of {number}"), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))


def _ended_well(train: Callable[[], None], report: Report, seat: Seat | None = None) -> bool:
    error = ""
    try:
        train()
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    if seat is not None:
        seat.close()
    report("ended", error=error)
    return not error


def _prepare() -> None:
    """Let this process print where its threads are when asked, and leave Ctrl-C to the soak."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def use() -> dict[str, int]:
    """Return what this process uses: KiB of memory, threads, files and sockets; and files of shared memory by all."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them is closed by now
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "memory": int(resident.split()[1]),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(files),
        "sockets": sum(file.startswith("socket:") for file in files),
        "shared": len(os.listdir("/dev/shm")),
    }


def main() -> None:
    """Be a rank that torchrun has started: train as the order in a folder says."""
    _prepare()
    folder = Path(sys.argv[1])
    order: Order = pickle.loads((folder / "order").read_bytes())
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    report = Report(folder / f"{attempt}.{os.environ['RANK']}")
    dist.init_process_group("gloo")
    seat = Seat(order.episode, folder)
    try:
        seat.train(attempt, report)
    except Exception as error:
        report("ended", error=f"{type(error).__name__}: {error}")
        raise
    report("ended", error="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
