"""GPipe pipeline parallelism for PyTorch: micro-batches, checkpointing, skip connections.

Start at `GPipe`; `torchgpipe.balance` finds the balance, `torchgpipe.skip` declares skip connections.
"""

from __future__ import annotations

from torchgpipe.__version__ import __version__
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "__version__", "is_checkpointing", "is_recomputing"]
