"""Check the arguments of `DistributedGPipe`, and whether a process group exists."""

import warnings
from math import inf

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.distributed.rank_batch import Request
from torchgpipe.step.request import StepRequest, check_criterion

WITHIN_BACKWARD = (
    "a pipeline over ranks cannot run within a backward, because ranks reach a backward at "
    "different times; if torch.utils.checkpoint is around the pipeline, use the pipeline's "
    "argument checkpoint instead"
)


def check_group(mesh: DeviceMesh | None = None) -> None:
    """Check that a process group exists, and that a given mesh has exactly one dimension.

    Args:
        mesh: The `DeviceMesh` whose ranks hold the pipeline; `None` for all ranks.

    Raises:
        RuntimeError: If there is no process group.
        TypeError: If `mesh` is not a `DeviceMesh`, or has several dimensions.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: start the program with torchrun, call "
            "torch.distributed.init_process_group() before you make the pipeline, and call "
            "destroy_process_group() only after the last call of the pipeline"
        )
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
        RuntimeError: If there is no process group, or if this process has another rank than `own`.
        ValueError: If the timeout is not a positive number.
    """
    s = timeout
    if s is not None and (not isinstance(s, int | float) or s is True or not 0 < s < inf):
        raise ValueError(f"timeout must be a positive number of seconds, or None, but got {s!r}")
    check_group()
    if dist.get_rank() != own:
        raise RuntimeError(
            f"this pipeline has the partitions of rank {own}, and runs on that rank only; to "
            "run on other ranks, make a new pipeline there and load the saved state into it"
        )


def check_request(request: Request, n: int) -> None:
    """Check the criterion and the gradient scaler that this rank gives to `step` and similar calls.

    Only the rank of the last stage calls the criterion. Other ranks may give `None` for it.

    Args:
        request: The arguments of the call; `None` if the model itself was called.
        n: The number of ranks.

    Raises:
        TypeError: If the criterion is not a function; or if there are several ranks, and the
            gradient scaler looks for overflows only in the gradients of this rank.
    """
    if request is None:
        return
    if request.criterion is not None:
        check_criterion(request.criterion, request.call)
    scaler = request.scaler if isinstance(request, StepRequest) else None
    if n == 1 or not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return
    # This import takes time, and few programs need it.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not isinstance(scaler, ShardedGradScaler):
        raise TypeError(
            f"the gradient scaler {type(scaler).__name__} looks for overflows only in the "
            "gradients of its own rank, so ranks would scale the loss by different numbers; give "
            "each rank a ShardedGradScaler() of torch.distributed.fsdp.sharded_grad_scaler instead"
        )


def warn_without_parameters(module: nn.Module, own: nn.ModuleList, rank: int) -> None:
    """Warn if this rank's layers have no parameters, because an optimizer refuses an empty list.

    Args:
        module: All layers of the model. If none of them has parameters, there is no warning,
            because no rank needs an optimizer.
        own: The partitions of this rank.
        rank: The number of this rank.
    """
    has_none = next(own.parameters(), None) is None
    if not has_none or next(module.parameters(), None) is None:
        return
    warnings.warn(
        f"rank {rank} has no parameters, and an optimizer refuses an empty list: make the "
        "optimizer with a group of parameters, which may be empty, as in "
        "torch.optim.SGD([{'params': list(model.parameters())}], lr=0.1), or give this rank a "
        "layer with parameters by another balance",
        stacklevel=3,
    )
