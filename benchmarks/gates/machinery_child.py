"""Measure the torchgpipe that comes first on `sys.path`, for `benchmarks.gates.machinery`."""

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from benchmarks.pipelines import evenly, on_cpu
from reproduce.models.amoebanet import amoebanetd  # without torchgpipe, which may be another one
from torchgpipe import GPipe


class Buffered(nn.Linear):
    """A layer with a buffer that stays, and one that changes in each pass."""

    scale: Tensor
    count: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("count", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.scale


MODELS: dict[
    str, tuple[Callable[[int], nn.Sequential], tuple[int, ...]]
] = {  # build(n), sample's shape
    "linear": (lambda n: nn.Sequential(*(nn.Linear(8, 8) for _ in range(n))), (8,)),
    "buffers": (lambda n: nn.Sequential(*(Buffered(8, 8) for _ in range(n))), (8,)),
    "AmoebaNet-D": (lambda n: amoebanetd(3, 8, num_classes=10), (3, 224, 224)),
}
MODES = ("never", "except_last", "always")


class Subject:
    """A model, and an input of one sample per micro-batch. `way` is "plain" for a loop, or a pipeline's engine."""

    def __init__(
        self, model: str, n: int, m: int, checkpoint: str, device: str, way: str | None
    ) -> None:
        build, shape = MODELS[model]
        torch.manual_seed(0)
        self.layers, self.x = build(n).to(device), torch.rand(m, *shape, device=device)
        balance = evenly(self.layers, n)
        self.run: Callable[[Tensor], Tensor]
        if way == "plain":
            self.run = _plain(
                self.layers, balance, m, {"never": 0, "except_last": m - 1, "always": m}[checkpoint]
            )
        elif device == "cpu":
            self.run = on_cpu(self.layers, balance, way, chunks=m, checkpoint=checkpoint)
        else:
            self.run = GPipe(
                self.layers, balance, devices=[device] * n, chunks=m, checkpoint=checkpoint
            )  # type: ignore[arg-type]


def _plain(
    layers: nn.Sequential, balance: list[int], m: int, checkpointed: int
) -> Callable[[Tensor], Tensor]:
    """Return a loop over micro-batches, each partition of the first `checkpointed` under `torch.utils.checkpoint`."""
    partitions = [layers[a:b] for a, b in pairwise(accumulate(balance, initial=0))]

    def run(x: Tensor) -> Tensor:
        outputs = []
        for i, y in enumerate(x.chunk(m)):
            for partition in partitions if i < checkpointed else ():
                y = plain_checkpoint(partition, y, use_reentrant=False)
            outputs.append(y if i < checkpointed else layers(y))
        return torch.cat(outputs)

    return run


def prepare(steps: int, *how: Any) -> Callable[[], list[tuple[float, float]]]:
    """Return a function that measures so many steps. `how`: the arguments of `Subject`; raise if they cannot run."""
    measure(1, *how)
    return partial(measure, steps, *how)


def measure(
    steps: int, model: str, n: int, m: int, checkpoint: str, device: str, way: str | None
) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds per task for each of `steps` steps, after three warm-up steps."""
    subject = Subject(model, n, m, checkpoint, device, way)

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
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
            samples.append(((ran - began) / (n * m), (ended - summed) / (n * m)))
    return samples
