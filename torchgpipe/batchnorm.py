"""Deferred batch normalization, by its name in torchgpipe 0.0.7."""

from torchgpipe.task.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
