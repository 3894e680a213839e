"""Measure how long tasks take with the torchgpipe version that this process imports.

`benchmarks.gates.machinery` and `benchmarks.gpu.issued` use this module.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from benchmarks.pipelines import evenly, on_cpu
from reproduce.models.amoebanet import amoebanetd  # it does not import torchgpipe
from torchgpipe import GPipe


class Buffered(nn.Linear):
    """A linear layer with two buffers: one never changes, and one changes in each forward."""

    scale: Tensor
    count: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.scale


class Model(NamedTuple):
    """A model: a function that builds it for `n` partitions, and the shape of one sample."""

    build: Callable[[int], nn.Sequential]
    shape: tuple[int, ...]


def _repeated(layer: type[nn.Linear], n: int) -> nn.Sequential:
    layers = [layer(8, 8) for _ in range(n)]
    return nn.Sequential(*layers)


MODELS = {
    "linear": Model(partial(_repeated, nn.Linear), (8,)),
    "buffers": Model(partial(_repeated, Buffered), (8,)),
    "AmoebaNet-D": Model(lambda n: amoebanetd(3, 8, num_classes=10), (3, 224, 224)),
    "AmoebaNet-D (18, 256)": Model(lambda n: amoebanetd(18, 256), (3, 224, 224)),
}
MODES = ("never", "except_last", "always")


class Way(NamedTuple):
    """The options of one measurement: a model, and how the model runs.

    Attributes:
        model: A key of `MODELS`.
        n: The number of partitions.
        m: The number of micro-batches.
        checkpoint: The checkpoint mode.
        device: The device of all partitions.
        engine: "plain" for a loop without a pipeline, an engine of `benchmarks.pipelines`, or
            `None` for the default engine of `GPipe`.
        samples: The number of samples in each micro-batch.
    """

    model: str
    n: int
    m: int
    checkpoint: str
    device: str
    engine: str | None
    samples: int = 1


class Subject:
    """A model that is ready to run with the options of a measurement, and its input.

    Args:
        way: The options, such as the engine and the number of micro-batches.
        layers: The layers of the model. By default, they are built from `way`.
    """

    def __init__(self, way: Way, layers: nn.Sequential | None = None) -> None:
        build, shape = MODELS[way.model]
        n, m, device = way.n, way.m, way.device
        torch.manual_seed(0)
        self.layers = build(n).to(device) if layers is None else layers
        self.x = torch.rand(m * way.samples, *shape, device=device)
        balance = evenly(self.layers, n)
        options: Any = {"chunks": m, "checkpoint": way.checkpoint}
        self.run: Callable[[Tensor], Tensor]
        if way.engine == "plain":
            checkpointed = {"never": 0, "except_last": m - 1, "always": m}[way.checkpoint]
            self.run = plain_loop(self.layers, balance, m, checkpointed)
        elif device == "cpu":
            self.run = on_cpu(self.layers, balance, way.engine, **options)
        else:
            self.run = GPipe(self.layers, balance, devices=[device] * n, **options)


def plain_loop(
    layers: nn.Sequential, balance: list[int], m: int, checkpointed: int
) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the layers on each micro-batch, without a pipeline.

    With each of the first `checkpointed` micro-batches, the function runs every partition by
    `torch.utils.checkpoint`.
    """
    bounds = accumulate(balance, initial=0)
    partitions = [layers[begin:end] for begin, end in pairwise(bounds)]

    def run(x: Tensor) -> Tensor:
        outputs = []
        for i, y in enumerate(x.chunk(m)):
            if i < checkpointed:
                for partition in partitions:
                    y = plain_checkpoint(partition, y, use_reentrant=False)
            else:
                y = layers(y)
            outputs.append(y)
        return torch.cat(outputs)

    return run


def prepare(steps: int, *fields: Any) -> Callable[[], list[tuple[float, float]]]:
    """Return a function that measures `steps` steps; raise an error if the model cannot run.

    `fields` are the options of the measurement, such as the model and the number of partitions, in
    the order in which the class `Way` lists them.
    """
    way = Way(*fields)
    measure(1, way)
    return partial(measure, steps, way)


def measure(steps: int, way: Way) -> list[tuple[float, float]]:
    """Run three warm-up steps, and then time `steps` steps.

    Return, for each timed step, the seconds of forward and of backward per task.
    """
    subject = Subject(way)
    tasks = way.n * way.m

    def clock() -> float:
        if way.device == "cuda":
            torch.accelerator.synchronize()
        return time.perf_counter()

    samples = []
    for step in range(-3, steps):
        began = clock()
        y = subject.run(subject.x)
        ran = clock()
        loss = y.sum()
        summed = clock()
        loss.backward()
        ended = clock()
        if step >= 0:
            samples.append(((ran - began) / tasks, (ended - summed) / tasks))
    return samples
