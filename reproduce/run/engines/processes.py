"""Run a pipeline's partitions in separate processes (ranks), a step at a time.

The parent process sends requests to all ranks. A request is one of these pairs:

- the name of an engine, and a function that returns the training to run (`Work`);
- `"step"`, and the time at which all ranks shall begin a training step;
- `"record"`, and the time at which all ranks shall begin a training step that is recorded as a
  timeline.

A rank replies with one of these pairs:

- `"answer"`, and the result. The result of a step is the time at which the step ended, the loss,
  and the events of the timeline.
- `"failed"`, and the reason. Then the rank ends.
- `"waits"`, and a text that says that the rank has waited long for other ranks. A further reply
  follows.
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

from reproduce.error import ENDING, Error
from reproduce.records.record import Engine
from reproduce.run.engines.engines import Trainer, Work
from reproduce.run.engines.failure import Failure, explain
from reproduce.run.engines.launch import Ended, Launched
from torchgpipe.patience import waiting_for
from torchgpipe.plan.predict.replay import Event, Timeline
from torchgpipe.timeline import record

AHEAD = 0.01
"""The seconds from the request of a step to its start, by which all ranks have the request."""
GRACE = 2.0
"""The seconds for which to wait for the errors of other ranks after one rank has failed."""
PATIENCE = timedelta(days=365)
"""The timeout of the process group, practically none: ranks are idle while other rows run."""


class Processes:
    """The processes (ranks) of a pipeline, one for each partition.

    Each process uses as many threads as the process that creates this object. The processes end
    when `close()` is called, or when the creating process ends. If one of them fails, all of them
    end, and the method that waits for an answer raises `Error` or `torch.OutOfMemoryError`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._folder = TemporaryDirectory()
        store = f"file://{self._folder.name}/store"
        self._ranks = Launched("spawn", count, _serve, count, torch.get_num_threads(), store)

    def make(self, engine: Engine, work: Callable[[], Work]) -> None:
        """Prepare all ranks to run a training.

        Args:
            engine: The engine that runs the training.
            work: A function that returns the training. Every rank calls it. It is pickled, so the
                ranks must be able to import it.
        """
        self._ask(engine, work)

    def step(self) -> tuple[float, float]:
        """Run a training step on all ranks; return the slowest rank's seconds, and the loss."""
        seconds, loss, _ = self._step("step")
        return seconds, loss

    def record(self) -> Timeline:
        """Run a training step on all ranks, and return the timeline of all tasks.

        Only the engine `ranks` records a timeline.
        """
        seconds, _, (events,) = self._step("record")
        recorded = [Event(*each) for each in events]
        return Timeline(recorded, seconds, self._count)

    def close(self) -> None:
        """End all processes."""
        self._ranks.close()
        self._folder.cleanup()

    def _step(self, what: str) -> tuple[float, float, Any]:
        start = time.perf_counter() + AHEAD
        answers = self._ask(what, start)
        ends, losses, recorded = zip(*answers, strict=True)
        return max(ends) - start, losses[-1], recorded[0]

    def _ask(self, *request: Any) -> list[Any]:
        """Send a request to all ranks, wait for them, and return the answer of each rank."""
        self._ranks.send(request)
        answers, failures = self._replies()
        if failures:
            self.close()
            raise _error_of(failures)
        return [answers[rank] for rank in range(self._count)]

    def _replies(self) -> tuple[dict[int, Any], list[Failure]]:
        """Wait until all ranks have replied; return each rank's answer, and a list of failures.

        After the first failure, wait only for a short time. Other ranks may never reply, because
        they wait for the failed rank.
        """
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        busy = set(range(self._count))
        while busy:
            seconds = GRACE if failures else None
            received = list(self._ranks.receive(busy, seconds))
            if not received:
                break
            for rank, said in received:
                if isinstance(said, Ended):
                    said = "failed", Failure("failed", f"a rank's process has ended {said.how}")
                kind, value = said
                if kind == "waits":
                    print(value, file=sys.stderr)
                    continue
                busy.remove(rank)
                if kind == "answer":
                    answers[rank] = value
                else:
                    failures.append(value)
        return answers, failures


def _error_of(failures: list[Failure]) -> Exception:
    """Return the error to raise, which names the reason of the rank that failed first.

    The other ranks fail with `RankFailed`, which only says that another rank has failed.
    """
    own = [failure for failure in failures if not failure.reason.startswith("RankFailed")]
    first = (own or failures)[0]
    if first.status == "out of memory":
        return torch.OutOfMemoryError(first.reason)
    return Error(first.reason)


def _serve(rank: int, link: Connection, count: int, threads: int, store: str) -> None:
    """Run a rank: answer the requests of the parent process until the parent ends.

    Args:
        rank: The number of this rank.
        link: The connection to the parent process.
        count: The number of ranks.
        threads: The number of threads that PyTorch uses in this rank.
        store: The argument `init_method` of `init_process_group`.
    """
    # Only the parent process handles Ctrl-C.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    # Drop what a rank prints. Otherwise it would be mixed with the table that the parent prints.
    for output in (1, 2):
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
                trainer = answer = None  # free the old trainer first, with its memory and threads
                gc.collect()
                trainer = Trainer(what, given())
            link.send(("answer", answer))
    except Exception as error:
        link.send(("failed", explain(error)))
        os._exit(1)  # at once, even if other threads still wait


def _step(trainer: Trainer, start: float, *, recorded: bool) -> tuple[float, float | None, Any]:
    """Run this rank's part of a training step, which all ranks begin at the time `start`.

    Times are those of `time.perf_counter`, a clock that all processes share.

    Returns:
        The time at which the step ended, the loss if this rank has it, and the events of the
        timeline if `recorded` is true.
    """
    torch.manual_seed(trainer.steps)  # as `MeasuredSteps` does, so that dropout draws the same
    recording: Any = contextlib.nullcontext()
    if recorded and trainer.pipeline:
        recording = record(trainer.pipeline)
    with recording as found:
        while time.perf_counter() < start:
            pass  # busy waiting: a sleeping rank would start late
        loss = trainer.step()
        end = time.perf_counter()
    events = None if found is None else [each.events for each in found.steps]
    return end, loss, events


def _listen(link: Connection) -> SimpleQueue[bytes]:
    """Start a thread that receives the parent's requests; return the queue of these requests.

    When the parent process ends, the thread ends this process, even during a training step.
    """
    requests: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                requests.put(link.recv_bytes())
        finally:
            os._exit(0)

    threading.Thread(target=receive, name="requests", daemon=True).start()
    return requests
