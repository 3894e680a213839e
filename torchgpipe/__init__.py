"""GPipe pipeline parallelism for PyTorch: micro-batches, checkpointing, skip connections.

`GPipe` makes a pipeline of an `nn.Sequential`. `pipeline` makes a pipeline of any module, and
`distributed_pipeline` makes a pipeline that runs on several ranks (processes). `sequential` cuts
any module into an `nn.Sequential` for `GPipe`.

`torchgpipe.balance` chooses the number of layers for each device. `torchgpipe.skip` declares skip
connections between layers.
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
