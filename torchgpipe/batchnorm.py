"""Re-export `DeferredBatchNorm`, so that code written for torchgpipe 0.0.7 can import it here."""

from torchgpipe.task.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
