"""Re-export two functions, so that imports written for torchgpipe 0.0.7 work."""

from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
