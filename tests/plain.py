"""`Plain`, which runs layers without a pipeline, and `piped`, which makes a pipeline from them."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED

from .everywhere import Everywhere

Tensors = Tensor | tuple[Tensor, ...]

TWICE = [name for name in NAMED if len(make(name, 1, 1).placement) > 1]
"""The schedules with two stages on each device."""


class Undivided(nn.BatchNorm2d):
    """A batch norm that normalizes micro-batches, but tracks the statistics of whole mini-batches.

    Tests compare the results of a pipeline's deferred batch norm with this layer's results.
    """

    met: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self.met.append(x.detach().clone())
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def commit(self) -> None:
        if self.met:
            super().forward(torch.cat(self.met))

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # the input may have any number of dimensions


class Plain(nn.Sequential):
    """Layers without a pipeline. Tests compare their results with the results of a pipeline.

    The layers run on one micro-batch after another, and the outputs are concatenated.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        balance: object = None,
        *,
        devices: object = None,
        chunks: int,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(OrderedDict(layers.named_children()))
        self.chunks = chunks
        if deferred_batch_norm:
            self._defer()

    def _defer(self) -> None:
        """Make all batch norms track the statistics of whole mini-batches."""
        for layer in self.modules():
            if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.track_running_stats:
                layer.__class__ = Undivided

    def __getitem__(self, index: Any) -> Any:
        return nn.Sequential(OrderedDict(self.named_children()))[index]

    def loss(self, criterion: Any, value: Any, target: Any) -> Tensor:
        loss: Tensor = criterion(self(value), target)
        return loss

    def step(self, criterion: Any, value: Any, target: Any) -> Tensor:
        loss = self.loss(criterion, value, target)
        loss.backward()
        return loss.detach()

    def forward(self, value: Any) -> Any:
        norms = [layer for layer in self.modules() if isinstance(layer, Undivided)]
        for norm in norms:
            norm.met = []
        outputs = self.run(value)
        for norm in norms:
            norm.commit()
        return outputs

    def run(self, value: Any) -> Any:
        outputs = []
        for part in self.split(value):
            # Clear autocast's cache of low-precision copies of weights. Otherwise micro-batches
            # would share a copy, and autograd would add up their gradients in low precision.
            torch.clear_autocast_cache()
            outputs.append(super().forward(part))
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        columns = zip(*outputs, strict=True)
        return tuple(map(torch.cat, columns))

    def split(self, value: Tensors) -> list[Any]:
        if isinstance(value, Tensor):
            size = -(-value.shape[0] // self.chunks)  # rounded up
            return list(value.split(max(1, size)))
        columns = map(self.split, value)
        return list(zip(*columns, strict=True))


def piped(
    layers: nn.Sequential,
    balance: Sequence[int],
    chunks: int = 3,
    devices: Sequence[str] = ("cpu",),
    v: int = 1,
    **options: Any,
) -> Any:
    """Make a pipeline of the layers, in one process or over ranks.

    Args:
        layers: The layers.
        balance: The number of layers in each partition.
        chunks: The number of micro-batches.
        devices: The devices. If there are fewer devices than needed, they are used repeatedly.
        v: The number of partitions on each device.
        options: Further options of the pipeline. With `engine="ranks"`, the pipeline runs over the
            processes that run the test.
    """
    places = [devices[j % len(devices)] for j in range(len(balance) // v)]
    if options.get("engine") == "ranks":
        del options["engine"]
        return Everywhere(layers, balance, places, chunks=chunks, **options)
    return GPipe(layers, balance, devices=places, chunks=chunks, **options)
