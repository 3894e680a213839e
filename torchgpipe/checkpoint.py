"""Re-export `is_checkpointing` and `is_recomputing`, which torchgpipe 0.0.7 defined here."""

from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
