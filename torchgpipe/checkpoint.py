"""`is_checkpointing` and `is_recomputing`, under their module name of torchgpipe 0.0.7."""

from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
