"""Be one rank of a pipeline: `processes.py` starts as many as it has partitions, by torchrun.

Rank 0 reads requests from its standard input, each a pickled object in a line of base 64, and tells them to the others:
an engine and a function that makes its work, `None` for a step, or `"record"` for a step with its timeline. It answers
each by a line of JSON: none; the step's seconds and its loss; or its seconds and its tasks. A rank that fails writes a
line that says why, and ends; torchrun then ends the others. So does the end of the input, which comes at the latest
when the process that asks has ended.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from reproduce.run.engines import Engaged
from reproduce.run.failure import explain
from torchgpipe.distributed.patience import waiting_for
from torchgpipe.timeline import record

PATIENCE = timedelta(days=365)  # others may take their turns for as long as they like
AHEAD = 0.01  # seconds from a request to its step, so that every rank has heard of it before


def main() -> None:
    """Answer requests until there are no more."""
    # Whatever else is printed is no answer.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        os.write(answers, json.dumps(line).encode() + b"\n")  # at once, or lines of two ranks could mix

    try:
        with waiting_for("other ranks that torchrun starts", lambda line: say(waits=line)):
            dist.init_process_group("gloo", timeout=PATIENCE)
        for answer in answered():
            if dist.get_rank() == 0:
                say(answer=answer)
    except Exception as error:
        status, reason = explain(error)
        say(status=status, reason=reason)
        os._exit(1)  # whatever else this process waits for


def answered() -> Iterator[Any]:
    """Yield the answer to each request."""
    requests = listen() if dist.get_rank() == 0 else None
    engaged: Engaged | None = None
    while True:
        heard = [(requests.get(), time.perf_counter() + AHEAD) if requests is not None else (b"", 0.0)]
        dist.broadcast_object_list(heard)
        ((line, start),) = heard
        request = pickle.loads(base64.b64decode(line))
        if request is None:
            assert engaged is not None
            yield step(engaged, start)
        elif request == "record":
            assert engaged is not None and engaged.pipeline is not None
            with record(engaged.pipeline) as recording:
                seconds, _ = step(engaged, start)
            (timeline,) = recording.steps
            yield seconds, timeline.events
        else:
            engine, make = request
            engaged = None  # or two of them would need memory at once, and threads
            gc.collect()
            engaged = Engaged(engine, make())
            yield None


def step(engaged: Engaged, start: float) -> tuple[float, float | None]:
    """Run a step that begins on all ranks at once; return the seconds until all are done, and the loss.

    `start` is a time of the clock that all processes of a machine share.
    """
    torch.manual_seed(engaged.steps)  # as `MeasuredSteps` does, so that random layers do the same
    while time.perf_counter() < start:
        pass  # awake, as ranks are that have just done another step
    loss = engaged.step()
    mine = time.perf_counter(), loss
    found: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    ends, losses = zip(*found, strict=True)
    return max(ends) - start, losses[-1]


def listen() -> SimpleQueue[bytes]:
    """Return a queue of the lines of input. At its end this process ends, also in the middle of a step."""
    requests: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return requests


if __name__ == "__main__":
    main()
