"""Functions for micro-batches; torchgpipe 0.0.7 has them in a module of this name."""

from torchgpipe.tensors.microbatch import check, gather, scatter

__all__ = ["check", "gather", "scatter"]
