"""Deferred batch normalization, under its module name of torchgpipe 0.0.7."""

from torchgpipe.task.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
