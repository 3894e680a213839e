"""Run a pipeline's partitions in processes of their own, a step at a time.

A request goes to all ranks. It is an engine and a function that makes its work; or `"step"` and the time at which that
step begins; or `"record"` and that time, for a step with a timeline. A rank replies `"answer"`, and to a step with the
time of its end, the loss and the timeline's events. A rank that fails replies `"failed"` with the reason, and ends.
"""

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from reproduce.error import Error
from reproduce.records.record import Engine
from reproduce.run.engines.engines import Trainer, Work
from reproduce.run.engines.launch import Ended, Launched
from reproduce.run.failure import Failure, explain
from torchgpipe.patience import waiting_for
from torchgpipe.plan.replay import Event, Timeline
from torchgpipe.timeline import record

AHEAD = (
    0.01  # seconds from sending a request to its step, so that every rank has received it by then
)
GRACE = 2.0  # seconds to wait for other ranks' errors after one has failed
PATIENCE = timedelta(days=365)  # no timeout: while other rows take their turns, ranks are idle


class Processes:
    """A process per partition of a pipeline. Each uses as many threads as this process.

    They end with `close()` or with this process. They also end if one of them fails: then the method that was called
    raises `Error`, or `torch.OutOfMemoryError`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._folder = TemporaryDirectory()
        store = f"file://{self._folder.name}/store"
        self._ranks = Launched("spawn", count, _serve, count, torch.get_num_threads(), store)

    def make(self, engine: Engine, work: Callable[[], Work]) -> None:
        """Call `work`, which must be importable, on every rank, and prepare to train the result on `engine`."""
        self._ask(engine, work)

    def step(self) -> tuple[float, float]:
        """Run a training step on all ranks at once; return the seconds until the last one is done, and the loss."""
        seconds, loss, _ = self._step("step")
        return seconds, loss

    def record(self) -> Timeline:
        """Run a training step with the engine `ranks`, and return its timeline."""
        seconds, _, (events,) = self._step("record")
        return Timeline([Event(*each) for each in events], seconds, self._count)

    def close(self) -> None:
        """End all processes."""
        self._ranks.close()
        self._folder.cleanup()

    def _step(self, what: str) -> tuple[float, float, Any]:
        start = time.perf_counter() + AHEAD
        ends, losses, recorded = zip(*self._ask(what, start), strict=True)
        return max(ends) - start, losses[-1], recorded[0]

    def _ask(self, *request: Any) -> list[Any]:
        """Send a request to all ranks and return their answers."""
        self._ranks.send(request)
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        busy = {*range(self._count)}
        while busy and (received := [*self._ranks.receive(busy, GRACE if failures else None)]):
            for k, said in received:
                if isinstance(said, Ended):
                    said = "failed", Failure("failed", f"a rank's process has ended {said.how}")
                kind, value = said
                if kind == "waits":
                    print(value, file=sys.stderr)
                    continue
                busy.remove(k)
                if kind == "answer":
                    answers[k] = value
                else:
                    failures.append(value)
        if not failures:
            return [answers[k] for k in range(self._count)]
        self.close()
        # The failed rank gives the reason. The others only report that a rank failed.
        first = min(failures, key=lambda each: each.reason.startswith("RankFailed"))
        raise (
            torch.OutOfMemoryError(first.reason)
            if first.status == "out of memory"
            else Error(first.reason)
        )


def _serve(rank: int, link: Connection, count: int, threads: int, store: str) -> None:
    """Answer requests until the process ends. `store` is the `init_method` at which the ranks meet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent process handles Ctrl-C
    for output in (1, 2):  # output of ranks would appear in the middle of a table
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    torch.set_num_threads(threads)
    requests = _listen(link)
    trainer: Trainer | None = None
    try:
        with waiting_for("other ranks", lambda line: link.send(("waits", line))):
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=count, timeout=PATIENCE
            )
        while True:
            what, given = pickle.loads(requests.get())
            if what in ("step", "record"):
                assert trainer is not None
                answer = _step(trainer, given, recorded=what == "record")
            else:
                trainer = answer = None  # free the old one first, with its memory and threads
                gc.collect()
                trainer = Trainer(what, given())
            link.send(("answer", answer))
    except Exception as error:
        link.send(("failed", explain(error)))
        os._exit(1)  # at once, even if other threads still wait


def _step(trainer: Trainer, start: float, *, recorded: bool) -> tuple[float, float | None, Any]:
    """Run a step that begins on all ranks at the time `start` of `time.perf_counter`, which all processes share.

    Return the time of its end, its loss, and the events of its timeline if `recorded`.
    """
    torch.manual_seed(trainer.steps)  # as `MeasuredSteps` does, so that dropout draws the same
    recording: Any = (
        record(trainer.pipeline) if recorded and trainer.pipeline else contextlib.nullcontext()
    )
    with recording as found:
        while time.perf_counter() < start:
            pass  # busy waiting: a sleeping rank would start late
        loss = trainer.step()
        end = time.perf_counter()
    return end, loss, None if found is None else [each.events for each in found.steps]


def _listen(link: Connection) -> SimpleQueue[bytes]:
    """Return a queue of requests, filled by a thread. It ends this process when the parent ends, also during a step."""
    requests: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                requests.put(link.recv_bytes())
        finally:
            os._exit(0)

    threading.Thread(target=receive, name="requests", daemon=True).start()
    return requests
