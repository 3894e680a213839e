"""Pipelines over processes: each rank of `torch.distributed` holds one partition.
It may import `partitioned` and what that imports, not `state`, `plan` or `timeline`."""

from torchgpipe.distributed.gpipe import DistributedGPipe
from torchgpipe.distributed.liveness.liveness import RankFailed

__all__ = ["DistributedGPipe", "RankFailed"]
