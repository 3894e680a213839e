"""Re-export `DeferredBatchNorm`, so that imports written for torchgpipe 0.0.7 work."""

from torchgpipe.task.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
