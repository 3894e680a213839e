"""Re-export `check`, `gather` and `scatter`, which torchgpipe 0.0.7 defined here."""

from torchgpipe.tensors.gather import gather
from torchgpipe.tensors.microbatch import check, scatter

__all__ = ["check", "gather", "scatter"]
