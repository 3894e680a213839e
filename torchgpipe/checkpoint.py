"""Whether a layer is checkpointed or recomputed, by the names in torchgpipe 0.0.7."""

from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
