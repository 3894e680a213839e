"""Count the operations that pipelines of several configurations add in a training step.

The operations are operators, nodes of autograd graphs, calls that may wait for a thread, and calls
that poll.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential, Tanh

from benchmarks.gates.tally import Tally, tallied
from benchmarks.pipelines import ENGINES, evenly, on_cpu
from reproduce.models.built import unet
from reproduce.run.engines.ranks import Ranks
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.tensors.checkpoint import MODES, Mode, checkpointed


class Model(NamedTuple):
    """A model whose operations are counted.

    Attributes:
        build: A function that returns the layers.
        shape: The shape of a sample.
        options: Options of `GPipe`.
    """

    build: Callable[[], Sequential]
    shape: tuple[int, ...]
    options: Mapping[str, Any] = {}


def _linear(activation: Callable[[], Module]) -> Sequential:
    layers = Sequential()
    for _ in range(4):
        layers.append(Linear(8, 8))
        layers.append(activation())
    return layers


def _norm() -> Module:
    return BatchNorm1d(8)


MODELS = {
    "linear": Model(lambda: _linear(Tanh), (8,)),
    # The U-Net has skips across partitions, and dropout.
    "U-Net": Model(lambda: unet(depth=2, num_convs=1, base_channels=2), (3, 8, 8)),
    "batch norm": Model(lambda: _linear(_norm), (8,), {"deferred_batch_norm": True}),
}
SAMPLES = 2
"""The number of samples in each micro-batch."""
STEPS = 2
"""How many steps run. The first step starts the worker threads, and the last step is counted."""
RANKS = "ranks"
N = 2
"""The number of ranks."""


class Configuration(NamedTuple):
    """The configuration of a training step whose operations are counted.

    Attributes:
        model: The name of the model.
        n: The number of partitions on CPU devices, or of ranks.
        m: The number of micro-batches.
        checkpoint: The checkpoint mode.
        engine: An engine of `benchmarks.pipelines`, or `"ranks"`.
        schedule: The schedule of `model.step`, or "" for `model(x)` and `loss.backward()`.
    """

    model: str
    n: int
    m: int
    checkpoint: Mode
    engine: str
    schedule: str = ""

    def __str__(self) -> str:
        schedule = f"{self.schedule} " if self.schedule else ""
        return f"{self.model} n{self.n}m{self.m} {schedule}{self.checkpoint} {self.engine}"


# Each line: model, n, m, checkpoint modes, engines, schedules.
_TABLE: list[tuple[str, int, int, tuple[Mode, ...], tuple[str, ...], tuple[str, ...]]] = [
    ("linear", 1, 4, ("except_last",), ("graph",), ("",)),
    ("linear", 2, 4, MODES, ENGINES, ("",)),
    ("linear", 4, 1, ("never",), ENGINES, ("",)),
    ("U-Net", 4, 4, ("except_last",), ENGINES, ("",)),
    ("batch norm", 2, 4, ("except_last",), ENGINES, ("",)),
    ("linear", 2, 4, ("always", "never"), ("graph", "workers"), ("1F1B",)),
    ("linear", 2, 4, ("always", "never"), ("workers",), ("ZBH1",)),
    ("linear", N, 4, ("always", "never"), (RANKS,), ("GPipe", "1F1B", "ZBH1")),
]
CONFIGURATIONS: list[Configuration] = []
for model, n, m, modes, engines, schedules in _TABLE:
    for mode, engine, schedule in product(modes, engines, schedules):
        CONFIGURATIONS.append(Configuration(model, n, m, mode, engine, schedule))


class Counts(NamedTuple):
    """The operations that a pipeline adds in one training step (a forward and a backward).

    `operators` and `nodes` are differences: the counts of the pipeline minus the counts of a loop
    that runs the same layers on each micro-batch. Like the pipeline, the loop runs two forwards of
    a checkpointed micro-batch. So operators inside layers, which differ between PyTorch versions,
    cancel out. Each `.grad` is None before the step. If the pipeline has ranks, their counts are
    summed up.

    Attributes:
        operators: Maps the name of an operator to the number of its calls.
        nodes: The number of nodes of autograd graphs.
        waits: The number of calls that may wait for another thread.
        idles: The number of calls that sleep, read a clock, or look whether a queue has an item.
    """

    operators: Counter[str]
    nodes: int
    waits: int
    idles: int = 0

    def totals(self) -> dict[str, int]:
        """Return a dictionary with the total numbers of operators, nodes, waits and idles."""
        return {
            "operators": self.operators.total(),
            "nodes": self.nodes,
            "waits": self.waits,
            "idles": self.idles,
        }

    def plus(self, other: "Counts", sign: int = 1) -> "Counts":
        """Return the sum of these counts and `other` or, if `sign` is -1, their difference."""
        operators = Counter(self.operators)
        for operator, number in other.operators.items():
            operators[operator] += sign * number
        pairs = zip(self[1:], other[1:], strict=True)
        return Counts(operators, *[own + sign * theirs for own, theirs in pairs])


def counted() -> Iterator[tuple[str, Counts]]:
    """Yield the name of each configuration, and the operations that its pipeline adds in a step."""
    with closing(Ranks(N)) as ranks:
        for configuration in CONFIGURATIONS:
            yield str(configuration), count(configuration, ranks)


def count(asked: Configuration, ranks: Ranks | None = None) -> Counts:
    """Count the operations that a pipeline adds in a training step. See `Counts`.

    Several steps run, but only the last step is counted, because the first step starts threads.

    Args:
        asked: The configuration of the step.
        ranks: The processes that run the step, if the configuration has ranks.
    """
    if asked.engine == RANKS:
        assert ranks is not None
        of_ranks: list[Counts] = ranks.run(_on_rank, asked)
        total = of_ranks[0]
        for other in of_ranks[1:]:
            total = total.plus(other)
        return total.plus(_plain(asked), -1)
    build, shape, options = MODELS[asked.model]
    x = torch.randn(asked.m * SAMPLES, *shape)
    layers = build()
    if asked.schedule:
        options = {**options, "schedule": asked.schedule}
    with tallied() as tally:
        balance = evenly(layers, asked.n)
        pipeline = on_cpu(
            layers, balance, asked.engine, chunks=asked.m, checkpoint=asked.checkpoint, **options
        )
        if asked.schedule:
            found = _last(lambda: pipeline.step(criterion, x, x), layers, tally)
        else:
            found = _last(lambda: criterion(pipeline(x), x).backward(), layers, tally)
    return found.plus(_plain(asked), -1)


def _plain(asked: Configuration) -> Counts:
    """Count the operations of a step in which the configuration's layers run without a pipeline.

    The layers run on one micro-batch after another.
    """
    build, shape, _ = MODELS[asked.model]
    layers = build()
    x = torch.randn(asked.m * SAMPLES, *shape)
    recomputed = checkpointed(asked.checkpoint, asked.m)

    def step() -> None:
        outputs = []
        for i, micro_batch in enumerate(x.chunk(asked.m) if asked.m > 1 else [x]):
            if i < recomputed:
                with torch.no_grad():
                    layers(micro_batch)
            output = layers(micro_batch)
            if asked.schedule:
                criterion(output, x).backward()
            outputs.append(output)
        if not asked.schedule:
            output = torch.cat(outputs) if asked.m > 1 else outputs[0]
            criterion(output, x).backward()

    with tallied() as tally:
        return _last(step, layers, tally)


def _on_rank(_: object, asked: Configuration) -> Counts:
    """Count the operations of this rank in the last training step of a distributed pipeline."""
    build, shape, _ = MODELS[asked.model]
    layers = build()
    x = torch.randn(asked.m * SAMPLES, *shape)
    with tallied(alone=True) as tally:
        model = DistributedGPipe(
            layers,
            evenly(layers, asked.n),
            chunks=asked.m,
            checkpoint=asked.checkpoint,
            schedule=asked.schedule,
        )
        with closing(model):
            return _last(lambda: model.step(criterion, x, x), model, tally)


def criterion(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def _last(step: Callable[[], object], layers: Module, tally: Tally) -> Counts:
    for _ in range(STEPS):
        layers.zero_grad()
        tally.clear()
        step()
    operators = Counter(tally.operators)
    return Counts(operators, sum(tally.nodes), len(tally.waits), len(tally.idles))
