"""Pipelines over processes: each rank of `torch.distributed` holds one or more partitions."""

from torchgpipe.distributed.gpipe import DistributedGPipe
from torchgpipe.distributed.liveness.liveness import RankFailed

__all__ = ["DistributedGPipe", "RankFailed"]
