"""Functions for micro-batches, under the module name that they have in torchgpipe 0.0.7."""

from torchgpipe.tensors.microbatch import check, gather, scatter

__all__ = ["check", "gather", "scatter"]
