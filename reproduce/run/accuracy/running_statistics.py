"""Compare batch norm's running statistics with those that it would have kept of whole mini-batches.

Two trainings cannot be compared here. A micro-batch is normalized by its own mean and variance, so from the first
batch norm on a pipeline's layers see other values than a plain model's, and its parameters go another way. What has to
be the same is what a layer makes of the values that it sees. So beside every batch norm of the pipeline, statistics are
kept by PyTorch's own batch norm of the same values, all micro-batches of a mini-batch joined.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchgpipe import is_recomputing


class WholeBatchStatistics:
    """Keep the running statistics of whole mini-batches, from now on, for every batch norm of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [_Layer(layer) for layer in model.modules() if isinstance(layer, _BatchNorm)]

    def end_mini_batch(self) -> None:
        """Update the statistics from what the layers have seen since the last time."""
        for layer in self.layers:
            layer.update()

    def close(self) -> float:
        """Stop looking at the model.

        Return the largest difference of a layer's running mean or variance, relative to its largest value.
        """
        for layer in self.layers:
            layer.hook.remove()
        return max((layer.difference() for layer in self.layers), default=0.0)


class _Layer:
    """Keep the statistics beside one batch norm."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.mean, self.var = (statistic.clone() for statistic in self._own())
        self.seen: list[Tensor] = []
        self.hook = layer.register_forward_pre_hook(self.see)

    def see(self, layer: nn.Module, inputs: Any) -> None:
        """Remember a micro-batch. Each layer's come one after another, in the thread of its partition."""
        if layer.training and not is_recomputing():
            self.seen.append(inputs[0].detach())

    @torch.no_grad()
    def update(self) -> None:
        """Take what was seen as one mini-batch."""
        seen, self.seen = self.seen, []
        momentum = self.layer.momentum
        assert momentum is not None
        F.batch_norm(torch.cat(seen), self.mean, self.var, training=True, momentum=momentum)

    def difference(self) -> float:
        """Return how far the layer's statistics are from those of whole mini-batches, relative to the largest value."""
        pairs = zip(self._own(), (self.mean, self.var), strict=True)
        return max(float((found - expected).abs().max() / expected.abs().max()) for found, expected in pairs)

    def _own(self) -> tuple[Tensor, Tensor]:
        mean, var = self.layer.running_mean, self.layer.running_var
        assert mean is not None and var is not None
        return mean, var
