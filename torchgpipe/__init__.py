"""GPipe pipeline parallelism for PyTorch: micro-batches, checkpointing, skip connections.

`GPipe` makes a pipeline of an `nn.Sequential`. `pipeline` and `sequential` accept any module, and
so does `distributed_pipeline`, for a pipeline over ranks.
`torchgpipe.balance` finds a balance: the number of layers on each device. `torchgpipe.skip`
declares skip connections.
"""

from torchgpipe.__version__ import __version__
from torchgpipe.gpipe import GPipe
from torchgpipe.plan.pipeline import pipeline
from torchgpipe.plan.ranks import distributed_pipeline
from torchgpipe.tensors.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.tensors.microbatch import MicroBatches
from torchgpipe.trace import sequential

__all__ = [
    "GPipe",
    "MicroBatches",
    "__version__",
    "distributed_pipeline",
    "is_checkpointing",
    "is_recomputing",
    "pipeline",
    "sequential",
]
