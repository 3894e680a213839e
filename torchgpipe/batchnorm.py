"""Deferred batch normalization, under the module name that it has in torchgpipe 0.0.7."""

from torchgpipe.task.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
