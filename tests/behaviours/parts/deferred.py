"""What a pipeline with deferred batch norm computes: `Deferred`, plain layers whose statistics are of mini-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...plain import Plain


class Undivided(nn.BatchNorm2d):
    """Batch norm with the running statistics of the mini-batch."""

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
        pass  # of any number of dimensions


class Deferred(Plain):
    """Plain layers; with `defer()`, their batch norms count each mini-batch once."""

    def defer(self) -> None:
        for layer in self.modules():
            if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.track_running_stats:
                layer.__class__ = Undivided

    def forward(self, value: Any) -> Any:
        norms = [layer for layer in self.modules() if isinstance(layer, Undivided)]
        for norm in norms:
            norm.met = []
        outputs = self.run(value)
        for norm in norms:
            norm.commit()
        return outputs

    def run(self, value: Any) -> Any:
        return super().forward(value)
