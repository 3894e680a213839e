"""Make a pipeline over ranks from any module; its settings are chosen by prediction."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.distributed.checks import check_group
from torchgpipe.distributed.gpipe import DistributedGPipe
from torchgpipe.layers.split import Init
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.pipeline import sample_on, schedules_of
from torchgpipe.plan.planner import HERE, plan
from torchgpipe.plan.report import Plan
from torchgpipe.schedules import Schedule
from torchgpipe.step.request import Criterion
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.trace.sequential import sequential
from torchgpipe.trace.whole import Whole


def distributed_pipeline(  # noqa: PLR0913 - each is an option of the user's
    module: nn.Module,
    sample: Any,
    *,
    batch_size: int,
    mesh: DeviceMesh | None = None,
    device: int | str | torch.device = "cpu",
    memory: str | float | None = None,
    headroom: float | None = None,
    hardware: str | Path | Hardware = HERE,
    optimizer: str = "sgd",
    chunks: int | Sequence[int] | None = None,
    checkpoint: Mode | Sequence[Mode] = MODES,
    schedule: str | Schedule | None = None,
    schedules: Sequence[str | Schedule] | None = None,
    autocast: torch.dtype | None = None,
    criterion: Criterion | None = None,
    target: Any = None,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
    dynamic_shapes: Any = None,
    init: Init | None = None,
) -> DistributedGPipe:
    """Make a pipeline over ranks from any module, with the settings predicted to be fastest.

    Each rank runs one partition or more. All ranks must call this function, with the same arguments
    except `device`. The first rank chooses the balance, the number of micro-batches, the
    checkpointing and the schedule as `torchgpipe.pipeline` does, and sends them to all ranks. One
    line on the first rank's standard error describes them.

        model = distributed_pipeline(module, sample, batch_size=64)    # on every rank
        loss = model.step(nn.functional.cross_entropy, x, target)

    Args:
        module: Any module, the same on every rank, with its parameters on one device.
        sample: See `torchgpipe.pipeline`. A profile uses the first rank's sample.
        batch_size: The number of samples in a mini-batch.
        mesh: The ranks of the pipeline, as for `DistributedGPipe`; by default all ranks.
        device: This rank's device, as for `DistributedGPipe`.
        memory: See `torchgpipe.pipeline`.
        headroom: See `torchgpipe.pipeline`.
        hardware: See `torchgpipe.pipeline`.
        optimizer: See `torchgpipe.pipeline`.
        chunks: See `torchgpipe.pipeline`.
        checkpoint: See `torchgpipe.pipeline`.
        schedule: See `torchgpipe.pipeline`.
        schedules: See `torchgpipe.pipeline`.
        autocast: See `torchgpipe.pipeline`.
        criterion: See `torchgpipe.pipeline`.
        target: See `torchgpipe.pipeline`.
        whole: See `torchgpipe.pipeline`.
        shared: See `torchgpipe.pipeline`.
        dynamic_shapes: See `torchgpipe.pipeline`.
        init: A function that sets the parameters and buffers of each layer of this rank, as for
            `DistributedGPipe`. It is required if the module is on device `meta`.

    Returns:
        The pipeline. Its attribute `plan` is the plan, without the layers.

    Raises:
        RuntimeError: If `torch.distributed` has no process group.
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, or if no setup that uses all ranks fits the
            memory.

    Warns:
        UserWarning: If a pipeline over fewer ranks is predicted to be faster.
    """
    check_group(mesh)
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    choices = schedules_of(schedule, schedules)
    layers = sequential(module, sample, whole=whole, shared=shared, dynamic_shapes=dynamic_shapes)
    told: list[Plan | Exception | None] = [None]
    if dist.get_rank() == ranks[0]:
        try:
            found = plan(
                layers,
                sample_on([device], sample) if hardware == HERE else sample,
                batch_size=batch_size,
                devices=len(ranks),
                memory=memory,
                headroom=headroom,
                hardware=hardware,
                optimizer=optimizer,
                chunks=chunks,
                checkpoint=checkpoint,
                schedules=choices,
                autocast=autocast,
                criterion=criterion,
                target=target,
            )
            fastest, found = found, found.on(len(ranks))
        except Exception as error:
            told = [error]  # Other ranks wait for the plan, and have to raise the error, too.
        else:
            _say(fastest, found)
            # Leave the layers out: no rank keeps layers of other ranks.
            told = [replace(found, module=nn.Sequential())]
    dist.broadcast_object_list(told, src=ranks[0], group=group)
    (answer,) = told
    if not isinstance(answer, Plan):
        assert answer is not None
        raise answer
    model = DistributedGPipe(
        layers,
        answer.balance,
        mesh=mesh,
        device=device,
        chunks=answer.chunks,
        checkpoint=answer.checkpoint,
        init=init,
        schedule=answer.schedule,
    )
    model.plan = answer
    return model


def _say(fastest: Plan, found: Plan) -> None:
    """Print one line about the plan; warn if a pipeline over fewer ranks is predicted to be faster.

    Args:
        fastest: The fastest plan, over any number of ranks.
        found: The plan for all ranks, which is used.
    """
    print(found.summary, file=sys.stderr)
    used, given = len(fastest.best.devices), len(found.best.devices)
    if used < given:
        share = found.seconds / fastest.seconds - 1
        warnings.warn(
            f"a pipeline over {used} of these {given} ranks would be {share:.0%} faster; "
            "print(model.plan) compares them",
            stacklevel=3,
        )
