"""Make a pipeline from any module, with a setup that a plan chooses."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchgpipe.gpipe import GPipe
from torchgpipe.layers.devices import check_list
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.planner import HERE, plan
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.trace.sequential import sequential
from torchgpipe.trace.whole import Whole


def pipeline(  # noqa: PLR0913 - each is an option of the user's
    module: nn.Module,
    sample: Any,
    *,
    devices: Iterable[int | str | torch.device],
    batch_size: int,
    memory: str | float | None = None,
    headroom: float | None = None,
    hardware: str | Path | Hardware = HERE,
    optimizer: str = "sgd",
    chunks: int | Sequence[int] | None = None,
    checkpoint: Mode | Sequence[Mode] = MODES,
    schedule: str | Schedule | None = None,
    schedules: Sequence[str | Schedule] | None = None,
    autocast: torch.dtype | None = None,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
    dynamic_shapes: Any = None,
) -> GPipe:
    """Make a pipeline of any module.

    1. `sequential` traces the module into layers.
    2. `plan` finds the fastest setup for the layers. One line on standard error names the setup.
    3. `GPipe` makes the pipeline. Its attribute `plan` is the plan.

        model = pipeline(module, sample, devices=["cuda:0", "cuda:1"], batch_size=64)
        loss(model(input), target).backward()
        print(model.plan)

    Args:
        module: Any module, with its parameters on one device.
        sample: The module's arguments, as for `sequential`: a tensor, a tuple of arguments, or a
            dictionary of arguments by name. It has as many samples as a large micro-batch.
        devices: The devices to use. The plan may use fewer devices, with a warning.
        batch_size: The number of samples in a mini-batch.
        memory: The memory of each device, in bytes or as text such as "24GiB".
        headroom: The memory that is left to the allocator, as for `plan`.
        hardware: The hardware to predict for: a hardware description, its name or its file. By
            default, the plan profiles the layers on the sample's device.
        optimizer: The name of the optimizer, as for `plan`.
        chunks: The numbers of micro-batches to choose from, or a single number.
        checkpoint: The checkpoint modes to choose from, or a single mode.
        schedule: The schedule, as for `GPipe`; by default "GPipe".
        schedules: The schedules to choose from, in place of `schedule`.
        autocast: The dtype of autocast in training, as for `plan`. The training itself has to
            enable autocast.
        whole: Submodules, or classes of submodules, that are not cut into layers.
        shared: The names of arguments without a batch dimension, as for `sequential`.
        dynamic_shapes: Which lengths may change, as for `sequential`. The plan is for the lengths
            of the sample.

    Raises:
        TypeError: If `sequential`, `plan` or `GPipe` refuses the type of an argument.
        ValueError: If one of the three functions refuses a value, or if no setup fits.

    Warns:
        UserWarning: If the plan uses fewer devices than were given.
    """
    check_list(devices)
    given = list(devices)
    layers = sequential(module, sample, whole=whole, shared=shared, dynamic_shapes=dynamic_shapes)
    found = plan(
        layers,
        sample,
        batch_size=batch_size,
        devices=len(given),
        memory=memory,
        headroom=headroom,
        hardware=hardware,
        optimizer=optimizer,
        chunks=chunks,
        checkpoint=checkpoint,
        schedules=schedules_of(schedule, schedules),
        autocast=autocast,
    )
    print(found.summary, file=sys.stderr)
    used = len(found.best.devices)
    if used < len(given):
        warnings.warn(
            f"the pipeline uses {used} of the {len(given)} devices that it was given: with more, "
            "its step would be slower or would not fit the memory; print(model.plan) compares them",
            stacklevel=2,
        )
    model = found.gpipe(devices=given)
    model.plan = found
    return model


def schedules_of(
    schedule: str | Schedule | None, schedules: Sequence[str | Schedule] | None
) -> str | Schedule | Sequence[str | Schedule]:
    """Return the schedules to choose from; raise `ValueError` if both arguments are given.

    Args:
        schedule: The argument of `pipeline`.
        schedules: The argument of `pipeline`.
    """
    if schedule is not None and schedules is not None:
        raise ValueError(
            "schedule is the schedule to use, and schedules are those to choose from: "
            "give only one of the two"
        )
    if schedules is not None:
        return schedules
    return "GPipe" if schedule is None else schedule
