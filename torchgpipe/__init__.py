"""GPipe pipeline parallelism for PyTorch: micro-batches, checkpointing, skip connections.

Start at `GPipe`, or with any module at `pipeline` and `sequential`; `torchgpipe.balance` finds the balance,
`torchgpipe.skip` declares skip connections.

Folders from the bottom up: `skip`, `tensors`, `task`, `engine`, beside these `trace` and `balance`, and on top
`distributed`, `state`, `plan` and `timeline`. Each may import from those below it.
"""

from torchgpipe.__version__ import __version__
from torchgpipe.gpipe import GPipe
from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.trace import sequential
from torchgpipe.trace.pipeline import pipeline

__all__ = ["GPipe", "__version__", "is_checkpointing", "is_recomputing", "pipeline", "sequential"]
