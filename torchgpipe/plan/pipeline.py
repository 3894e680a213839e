"""Make a pipeline from any module, with the balance and the settings predicted to be fastest."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchgpipe.gpipe import GPipe
from torchgpipe.layers.devices import check_list, choose_devices
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.planner import HERE, plan
from torchgpipe.schedules import Schedule
from torchgpipe.step.request import Criterion
from torchgpipe.tensors.checkpoint import MODES, Mode
from torchgpipe.trace.parts import Slots
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
    criterion: Criterion | None = None,
    target: Any = None,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
    dynamic_shapes: Any = None,
) -> GPipe:
    """Make a pipeline from any module, with the settings that are predicted to be fastest.

    1. `sequential` traces the module into layers.
    2. `plan` predicts which setup (balance, chunks, checkpoint mode and schedule) is the fastest
       that fits the memory. One line on standard error names this setup.
    3. `GPipe` makes the pipeline. The pipeline's attribute `plan` is the plan.

        model = pipeline(module, sample, devices=["cuda:0", "cuda:1"], batch_size=64)
        loss(model(input), target).backward()
        print(model.plan)

    Args:
        module: Any module, with its parameters on one device.
        sample: Arguments for the module's forward, as for `sequential`: a tensor, a tuple of
            arguments, or a dictionary of arguments by name. They should have as many samples as the
            largest micro-batch that the plan may choose.
        devices: The devices to use. If fewer of them are predicted to be faster, the pipeline uses
            fewer, with a warning.
        batch_size: The number of samples in a mini-batch.
        memory: The memory of each device, in bytes or as text such as "24GiB".
        headroom: The memory to leave free for PyTorch's allocator, as for `plan`.
        hardware: The hardware to predict for: a hardware description, its name or its file. By
            default, the layers are timed on the first device.
        optimizer: The name of the optimizer, as for `plan`.
        chunks: The numbers of micro-batches to choose from, or a single number.
        checkpoint: The checkpoint modes to choose from, or a single mode.
        schedule: The schedule, as for `GPipe`; by default "GPipe".
        schedules: The schedules to choose from, in place of `schedule`.
        autocast: The dtype of autocast in training, as for `plan`. The training itself has to
            enable autocast.
        criterion: The criterion of the training, as for `plan`, to include the loss in predictions.
        target: The target of the sample, for the criterion.
        whole: Submodules, or classes of submodules, that `sequential` must not split into several
            layers.
        shared: The names of arguments without a batch dimension, as for `sequential`.
        dynamic_shapes: Which dimensions of the arguments may change in length, as for `sequential`.
            The plan is for the lengths in the sample.

    Raises:
        TypeError: If `sequential`, `plan` or `GPipe` refuses the type of an argument.
        ValueError: If one of these three functions refuses a value, or if no setup fits the memory.

    Warns:
        UserWarning: If the plan uses fewer devices than were given.
    """
    check_list(devices)
    given = list(devices)
    layers = sequential(module, sample, whole=whole, shared=shared, dynamic_shapes=dynamic_shapes)
    found = plan(
        layers,
        sample_on(given[:1], sample) if hardware == HERE else sample,
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
        criterion=criterion,
        target=target,
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


def sample_on(devices: Sequence[int | str | torch.device], sample: Any) -> Any:
    """Return a copy of a sample on the first of some devices, where a plan times the layers.

    Args:
        devices: The devices. If there are none, the sample is returned as it is. Tensors on device
            `meta`, which have no values, are not moved.
        sample: The arguments of a module.
    """
    slots = Slots()
    taken = slots.taken(sample)
    chosen = choose_devices(devices, len(devices))
    if not chosen:
        return sample
    return slots.put_back(taken, [x if x.is_meta else x.to(chosen[0]) for x in slots.tensors])


def schedules_of(
    schedule: str | Schedule | None, schedules: Sequence[str | Schedule] | None
) -> str | Schedule | Sequence[str | Schedule]:
    """Return the schedules that the plan may choose from: "GPipe" if neither argument is given.

    Args:
        schedule: The argument of `pipeline`: the only schedule to use, or `None`.
        schedules: The argument of `pipeline`: the schedules to choose from, or `None`.

    Raises:
        ValueError: If both arguments are given.
    """
    if schedule is not None and schedules is not None:
        raise ValueError(
            "schedule= names the schedule to use, and schedules= names several to choose from: "
            "give only one of these two arguments"
        )
    if schedules is not None:
        return schedules
    return "GPipe" if schedule is None else schedule
