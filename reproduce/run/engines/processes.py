"""Run a pipeline's partitions in processes of their own, a step at a time."""

import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

from reproduce.error import Error
from reproduce.records.record import Engine
from reproduce.run.engines.engines import Work
from reproduce.run.engines.launch import Ended, Launched
from reproduce.run.engines.ranks import serve
from reproduce.run.failure import Failure
from torchgpipe.plan.replay import Event, Timeline

AHEAD = 0.01  # seconds from sending a request to its step, so that every rank has received it by then
GRACE = 2.0  # seconds to wait for other ranks' errors after one has failed


class Processes:
    """A process per partition of a pipeline. Each uses as many threads as this process.

    They end with `close()` or with this process. They also end if one of them fails: then the method that was called
    raises `Error`, or `torch.OutOfMemoryError`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._folder = TemporaryDirectory()
        store = f"file://{self._folder.name}/store"
        self._ranks = Launched("spawn", count, serve, count, torch.get_num_threads(), store)

    def make(self, engine: Engine, work: Callable[[], Work]) -> None:
        """Call `work` on every rank, and prepare to train the result on `engine`. `work` must be importable (pickled).

        It replaces what was made before.
        """
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
        raise torch.OutOfMemoryError(first.reason) if first.status == "out of memory" else Error(first.reason)
