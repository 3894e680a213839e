"""Re-export three functions, so that imports written for torchgpipe 0.0.7 work."""

from torchgpipe.tensors.microbatch import check, gather, scatter

__all__ = ["check", "gather", "scatter"]
