"""The plain layers, and this library's pipelines: threads and ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipelines import evenly
from tests.behaviours.pipe import Pipe
from tests.plain import Plain
from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe


class Layers(Pipe):
    """The layers without a pipeline, on each micro-batch in turn."""

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        deferred = self.row.deferred_batch_norm
        self.plain = Plain(nn.Sequential(layers), chunks=self.row.chunks, deferred_batch_norm=deferred)
        module: nn.Module = layers
        return module

    def call(self, x: Any) -> Any:
        return self.plain(x)


class Threads(Pipe):
    """`GPipe` with a thread for each partition."""

    package = "torchgpipe"
    engine: Any = "workers"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        layers, balance = as_layers(layers, balance, self.row.sample)
        names = ("chunks", "checkpoint", "deferred_batch_norm")
        return self.piped(layers, balance, **{name: getattr(self.row, name) for name in names})

    def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        return GPipe(layers, balance, devices=["cpu"] * len(balance), engine=self.engine, **options)


class Ranks(Threads):
    """`DistributedGPipe`."""

    ranks = True

    def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> Any:
        self.pipeline = DistributedGPipe(layers, balance, **options)
        return self.pipeline

    def loss(self, x: Any, target: Any) -> Tensor:
        return self.pipeline.loss(self.row.criterion, x, target)

    def clip_gradients(self, norm: float) -> None:
        self.pipeline.clip_grad_norm_(norm)


def as_layers(layers: Any, balance: list[Any], sample: Tensor | None) -> tuple[Any, list[int]]:
    """Return layers and balance; with a `sample`, trace a module that is not a sequence, and balance it evenly."""
    if sample is None:
        return layers, balance
    with torch.random.fork_rng():
        traced = sequential(layers, sample)
    return traced, evenly(traced, len(balance) + 1)
