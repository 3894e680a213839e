"""Count one training step of a pipeline, for a few fixed configurations, beside a plain loop over the same layers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.pipelines import ENGINES, evenly, on_cpu
from benchmarks.tally import Tally, tallied
from reproduce.models import unet
from torchgpipe.checkpoint import Mode, checkpointed


class Model(NamedTuple):
    """Layers, the shape of a sample, and what `GPipe` is asked for beside the configuration."""

    build: Callable[[], nn.Sequential]
    sample: tuple[int, ...]
    options: Mapping[str, Any] = {}


def _four_times(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(4) for layer in layers))


MODELS = {
    "linear": Model(lambda: _four_times(lambda: nn.Linear(8, 8), nn.Tanh), (8,)),
    # Its skips cross partitions, and its dropout draws.
    "U-Net": Model(lambda: unet(depth=2, num_convs=1, base_channels=2), (3, 8, 8)),
    "batch norm": Model(
        lambda: _four_times(lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8)), (8,), {"deferred_batch_norm": True}
    ),
}
SAMPLES = 2  # in a micro-batch
WARM_UP = 1  # mini-batches; the first starts the workers


class Configuration(NamedTuple):
    """A model in `n` partitions on CPU devices, and how its mini-batches of `m` micro-batches run (`pipelines`)."""

    model: str
    n: int
    m: int
    checkpoint: Mode
    engine: str

    def __str__(self) -> str:
        return f"{self.model} n{self.n}m{self.m} {self.checkpoint} {self.engine}"


MODES: tuple[Mode, ...] = ("never", "except_last", "always")
CONFIGURATIONS = [
    Configuration("linear", 1, 4, "except_last", "graph"),
    *(Configuration("linear", 2, 4, *rest) for rest in product(MODES, ENGINES)),
    *(Configuration("linear", 4, 1, "never", engine) for engine in ENGINES),
    *(Configuration("U-Net", 4, 4, "except_last", engine) for engine in ENGINES),
    *(Configuration("batch norm", 2, 4, "except_last", engine) for engine in ENGINES),
]


class Counts(NamedTuple):
    """Of one training step, forward and backward, that makes the parameters' gradients anew.

    `operators` and `nodes` are what the pipeline adds to a plain loop over the same layers and micro-batches, which
    runs the checkpointed ones forward twice: what layers do may differ between versions of PyTorch. Tensors are
    counted beyond those there before the step. `kept` are those alive between forward and backward. How many are
    `alive` at most depends on chance where workers overlap, and is not counted there.
    """

    operators: int
    nodes: int
    kept: int
    kept_bytes: int
    alive: int | None
    alive_bytes: int | None
    threads: int
    """Started by the pipeline in all of its life."""
    threads_left: int
    """That do not end when it is gone."""
    waits: int
    """Where a thread may wait for another: items handed over by queues, locks, joins."""
    reads: int
    """Where the host would wait for a device, if the tensors were on one."""


PER_TASK = ("operators", "nodes", "waits", "reads")


class Counted(NamedTuple):
    """The counts, and the operators they consist of: what is added to a plain loop, and what is there less often."""

    counts: Counts
    added: Counter[str]


def count(configuration: Configuration) -> Counted:
    """Run a few training steps and count the last one."""
    model, n, m, checkpoint, engine = configuration
    build, shape, options = MODELS[model]
    x = torch.randn(m * SAMPLES, *shape)
    with _undisturbed(), tallied() as tally:
        plain = _step(_Plain(build(), m, checkpointed(checkpoint, m)), x, tally)
        layers = build()
        piped = _step(on_cpu(layers, evenly(layers, n), engine, chunks=m, checkpoint=checkpoint, **options), x, tally)
        gc.collect()
        left = tally.left()
    added = piped.operators.copy()
    added.subtract(plain.operators)
    overlap = len(tally.threads) > 0
    counts = Counts(
        operators=added.total(),
        nodes=piped.nodes - plain.nodes,
        kept=piped.kept[0],
        kept_bytes=piped.kept[1],
        alive=None if overlap else piped.alive[0],
        alive_bytes=None if overlap else piped.alive[1],
        threads=len(tally.threads),
        threads_left=left,
        waits=piped.waits,
        reads=piped.reads,
    )
    return Counted(counts, added)


class _Plain(nn.Module):
    """The layers on each micro-batch in turn, on the first `twice` of them two times."""

    def __init__(self, layers: nn.Sequential, m: int, twice: int) -> None:
        super().__init__()
        self.layers, self.m, self.twice = layers, m, twice

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for i, micro_batch in enumerate(x.chunk(self.m) if self.m > 1 else [x]):
            if i < self.twice:
                with torch.no_grad():
                    self.layers(micro_batch)
            outputs.append(self.layers(micro_batch))
        return torch.cat(outputs) if self.m > 1 else outputs[0]


class _Step(NamedTuple):
    """What was seen of one step; of tensors their number and bytes."""

    operators: Counter[str]
    nodes: int
    kept: tuple[int, int]
    alive: tuple[int, int]
    waits: int
    reads: int


def _step(model: nn.Module, x: Tensor, tally: Tally) -> _Step:
    for _ in range(WARM_UP + 1):
        model.zero_grad()
        tally.settle()
        tally.clear()
        y = model(x)
        tally.settle()
        kept = tally.alive()
        y.square().mean().backward()
        del y
        tally.settle()
    return _Step(
        operators=Counter(map(str, tally.operators)),
        nodes=sum(tally.nodes),
        kept=kept,
        alive=tally.peak(),
        waits=len(tally.waits),
        reads=len(tally.reads),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let the garbage collector free nothing at a time of its own, and operators need no threads."""
    enabled, threads = gc.isenabled(), torch.get_num_threads()
    gc.disable()
    gc.freeze()  # what others left is not searched for each configuration
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
        if enabled:
            gc.enable()
