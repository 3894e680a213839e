"""Functions for micro-batches, under their module name of torchgpipe 0.0.7."""

from torchgpipe.tensors.microbatch import check, gather, scatter

__all__ = ["check", "gather", "scatter"]
