"""Check the arguments of `DistributedGPipe`, and whether a process group exists."""

from math import inf

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def check_group() -> None:
    """Raise `RuntimeError` if there is no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group(), in a program "
            "that torchrun has started, and destroy_process_group() only after the last call of "
            "the pipeline"
        )


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raise `TypeError` if a mesh has several dimensions."""
    if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim != 1):
        raise TypeError(
            f"mesh must be one dimension of a DeviceMesh, such as mesh['pp'], but got {mesh!r}"
        )


def check_connectable(timeout: object, own: int) -> None:
    """Check that a pipeline can connect to other ranks.

    Args:
        timeout: The pipeline's timeout, in seconds.
        own: The rank for which the pipeline was made, in the default process group.

    Raises:
        RuntimeError: If there is no process group, or if this process is another rank.
        ValueError: If the timeout is not a positive number.
    """
    s = timeout
    if s is not None and (not isinstance(s, int | float) or s is True or not 0 < s < inf):
        raise ValueError(f"timeout must be a positive number of seconds, or None, but got {s!r}")
    check_group()
    if dist.get_rank() != own:
        raise RuntimeError(
            f"this pipeline has the partitions of rank {own}, and runs on that rank only; to "
            "use other ranks, make a new pipeline and load the state"
        )
