"""The workers engine: on CPU, each partition's program runs in a thread of its own, forward and backward.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called `backward()`, so in one
graph the partitions could not overlap. Here each task has a graph of its own, and the pipeline as a whole is one node
of the caller's graph: a function of the micro-batches and of all parameters. Its forward and its backward each run the
programs of all partitions (program.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from torchgpipe.engine.batch import Batch, linked
from torchgpipe.engine.pool import Workers
from torchgpipe.engine.program import Links, Program
from torchgpipe.engine.relay import Relay
from torchgpipe.task.seeded import asking_private_generators
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import sharded
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, tensors_of
from torchgpipe.tensors.observe import Observer

T = TypeVar("T")


class WorkersEngine:
    """Run mini-batches through `stages` with a worker for each."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.workers = Workers(max(0, len(stages) - 1))

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, len(micro_batches), mode, observer)
        outputs = batch.forward(micro_batches)
        return linked(batch, outputs, [x for micro_batch in micro_batches for x in tensors_of(micro_batch)])


class _MiniBatch(Batch):
    """A mini-batch whose programs run in threads."""

    def __init__(self, engine: WorkersEngine, m: int, mode: Mode, observer: Observer | None) -> None:
        if sharded(module for stage in engine.stages for module in stage.modules):
            raise RuntimeError(
                "layers that FSDP shards (fully_shard) talk to other ranks, which has to happen in one order on all of "
                "them, but workers run at once; use engine='graph'"
            )
        super().__init__(engine.stages, len(engine.stages), m, mode, observer)
        self._workers = engine.workers

    def forward(self, micro_batches: list[TensorOrTensors]) -> list[Item]:
        """Run every task's forward; return the outputs without a graph."""
        with self._seeded:
            *_, outputs = self._run(lambda program, links: program.forward(links, micro_batches))
        self._check_kept()
        return outputs

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs."""
        ambient = self._begin_backward()
        grads, *_ = self._run(
            lambda program, links: program.backward(links, ambient, output_grads, keep=keep), reverse=True
        )
        ambient.ended(refuse=self._threads)
        return grads

    def _run(self, what: Callable[[Program, Links], list[T]], *, reverse: bool = False) -> list[list[T]]:
        """Call `what` for each program, at once if they can overlap; return results. In `reverse`, items go back."""
        n = len(self.programs)
        relay = Relay(n)
        links = relay.links()[:: -1 if reverse else 1]
        results: list[list[T]] = [[] for _ in links]
        threads = torch.get_num_threads()

        def run(j: int) -> None:
            # PyTorch keeps this number for each thread apart. Another one would change the bits, and crowd the cores.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            results[j] = what(self.programs[j], links[j])

        if self._overlaps:
            with asking_private_generators():
                self._workers.run(relay, [partial(run, j) for j in range(n)])
        else:
            for j in reversed(range(n)) if reverse else range(n):
                run(j)
        return results
