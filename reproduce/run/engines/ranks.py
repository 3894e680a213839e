"""Be one rank of a pipeline: `processes.py` starts as many as it has partitions.

All ranks get the same requests. A request is an engine and a function that makes its work; or `"step"`, or `"record"`
for a step with a timeline, and the time at which it begins. The answer to a step is `"answer"` with the time of its
end, the loss and the timeline's tasks. A rank that fails answers `"failed"` with the reason and ends.
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

from reproduce.run.engines.engines import Engaged
from reproduce.run.failure import explain
from torchgpipe.distributed.liveness.patience import waiting_for
from torchgpipe.timeline import record

PATIENCE = timedelta(days=365)  # others may take their turns for as long as they like


def serve(rank: int, link: Connection, count: int, threads: int, store: str) -> None:
    """Answer requests until there are no more, with so many threads; ranks meet at an address, `store`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    for output in (1, 2):  # what ranks print would be in the middle of a table
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    torch.set_num_threads(threads)
    requests = _listen(link)
    engaged: Engaged | None = None
    try:
        with waiting_for("other ranks", lambda line: link.send(("waits", line))):
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=PATIENCE)
        while True:
            what, given = pickle.loads(requests.get())
            if what in ("step", "record"):
                assert engaged is not None
                answer = _step(engaged, given, recorded=what == "record")
            else:
                engaged = answer = None  # or two of them would need memory at once, and threads
                gc.collect()
                engaged = Engaged(what, given())
            link.send(("answer", answer))
    except Exception as error:
        link.send(("failed", explain(error)))
        os._exit(1)  # whatever else this process waits for


def _step(engaged: Engaged, start: float, *, recorded: bool) -> tuple[float, float | None, Any]:
    """Run a step that begins on all ranks at once, at a time of the clock that all processes of a machine share.

    Return when it is over, its loss, and the events of its timeline where it is recorded.
    """
    torch.manual_seed(engaged.steps)  # as `MeasuredSteps` does, so that random layers do the same
    recording: Any = record(engaged.pipeline) if recorded and engaged.pipeline else contextlib.nullcontext()
    with recording as found:
        while time.perf_counter() < start:
            pass  # awake, as ranks are that have just done another step
        loss = engaged.step()
        end = time.perf_counter()
    return end, loss, None if found is None else [each.events for each in found.steps]


def _listen(link: Connection) -> SimpleQueue[bytes]:
    """Return a queue of requests. When the process that asks has ended, so does this one, also in a step."""
    requests: SimpleQueue[bytes] = SimpleQueue()

    def hear() -> None:
        try:
            while True:
                requests.put(link.recv_bytes())
        finally:
            os._exit(0)

    threading.Thread(target=hear, name="requests", daemon=True).start()
    return requests
