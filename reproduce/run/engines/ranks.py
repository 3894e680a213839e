"""Run one rank of a pipeline. `processes.py` starts one for each partition.

All ranks get the same requests: an engine and a function that makes its work; or `"step"` and the time at which it
begins; or `"record"` and that time, for a step with a timeline. A rank replies `"answer"`, for a step with the time of
its end, the loss and the timeline's events. A rank that fails replies `"failed"` with the reason, and ends.
"""

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from reproduce.run.engines.engines import Trainer
from reproduce.run.failure import explain
from torchgpipe.patience import waiting_for
from torchgpipe.timeline import record

PATIENCE = timedelta(days=365)  # no timeout: while other rows take their turns, ranks are idle


def serve(rank: int, link: Connection, count: int, threads: int, store: str) -> None:
    """Answer requests until the process ends. `store` is the `init_method` at which the ranks meet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent process handles Ctrl-C
    for output in (1, 2):  # output of ranks would appear in the middle of a table
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    torch.set_num_threads(threads)
    requests = _listen(link)
    trainer: Trainer | None = None
    try:
        with waiting_for("other ranks", lambda line: link.send(("waits", line))):
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=PATIENCE)
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
    recording: Any = record(trainer.pipeline) if recorded and trainer.pipeline else contextlib.nullcontext()
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
