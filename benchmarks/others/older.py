"""Define the class that runs checks (short trainings) with torchgpipe 0.0.7.

Version 0.0.7 and this library have the same name, `torchgpipe`. So this module is imported only in
a process that does not import this library.
"""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from tests.behaviours.pipe import NotOffered, Pipe
from torchgpipe import GPipe


class Older(Pipe):
    """Runs a check (a short training) with torchgpipe 0.0.7 on CPUs."""

    package = "torchgpipe"

    def build(self, layers: Any, balance: list[Any]) -> nn.Module:
        if self.row.sample is not None:
            raise NotOffered("it takes a sequence of layers")
        names = ("chunks", "checkpoint", "deferred_batch_norm")
        options = {name: getattr(self.row, name) for name in names}
        devices = ["cpu"] * len(balance)
        self.pipeline = GPipe(layers, balance, devices=devices, **options)
        # In the state dict of version 0.0.7, each name begins with the number of the partition. The
        # dictionary `named` has the layers by their names in the whole model, without this number.
        named: OrderedDict[str, nn.Module] = OrderedDict()
        for partition in self.pipeline.partitions:
            named.update(partition.named_children())
        return nn.Sequential(named)

    def call(self, x: Any) -> Any:
        self.pipeline.train(self.module.training)
        return self.pipeline(x)

    def load_model(self, whole: dict[str, Tensor]) -> None:
        raise NotOffered("its state dict cannot be loaded with another balance: its names differ")
