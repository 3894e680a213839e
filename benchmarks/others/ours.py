"""Run checks (short trainings) with this library's pipelines, or without a pipeline."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipelines import evenly
from tests.behaviours.pipe import Pipe
from tests.plain import Plain
from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe


class Layers(Pipe):
    """Runs a check (a short training) without a pipeline, on one micro-batch after another."""

    def build(self, layers: Any, balance: list[Any]) -> Any:
        row = self.row
        deferred = row.deferred_batch_norm
        whole = nn.Sequential(layers)
        self.plain = Plain(whole, chunks=row.chunks, deferred_batch_norm=deferred)
        return layers

    def call(self, x: Any) -> Any:
        return self.plain(x)


class Threads(Pipe):
    """Runs a check (a short training) with `GPipe` and one thread for each partition."""

    package = "torchgpipe"
    engine: Any = "workers"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        if self.row.sample is not None:  # a module that is not a sequence
            with torch.random.fork_rng():
                layers = sequential(layers, self.row.sample)
            balance = evenly(layers, len(balance) + 1)
        names = ("chunks", "checkpoint", "deferred_batch_norm")
        options = {name: getattr(self.row, name) for name in names}
        return self.piped(layers, balance, **options)

    def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        devices = ["cpu"] * len(balance)
        return GPipe(layers, balance, devices=devices, engine=self.engine, **options)


class Ranks(Threads):
    """Runs a check with `DistributedGPipe`."""

    ranks = True

    def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> Any:
        self.pipeline = DistributedGPipe(layers, balance, **options)
        return self.pipeline

    def loss(self, x: Any, target: Any) -> Tensor:
        return self.pipeline.loss(self.row.criterion, x, target)

    def clip_gradients(self, norm: float) -> None:
        self.pipeline.clip_grad_norm_(norm)
