"""Settings of a pipeline that have to be the same on all ranks."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchgpipe.partitioned import Partitioned

Settings = Mapping[str, Any]
"""Maps the name of a setting, as error messages write it, to the setting's value."""


def settings_of(
    pipeline: Partitioned, order: str, timeout: float | None, checksum: int, call: str
) -> dict[str, Any]:
    """Return the settings of a mini-batch that have to be the same on all ranks.

    Args:
        pipeline: This rank's pipeline.
        order: The name of the schedule, followed by a checksum if the user has made the schedule.
        timeout: The timeout of the pipeline.
        checksum: The checksum of the names and shapes of the model's parameters. If it differs
            between ranks, they run different models. For example, a script makes two pipelines,
            and one rank makes them in another order than the other ranks.
        call: The method that the user has called, such as "loss()".
    """
    kind = pipeline._stages[0].device.type
    autocast: bool | str = False
    if kind != "meta" and torch.is_autocast_enabled(kind):
        autocast = str(torch.get_autocast_dtype(kind))
    return {
        "the balance": tuple(pipeline.balance),
        "the schedule": order,
        "chunks": pipeline.chunks,
        "checkpoint": pipeline.checkpoint,
        "training": pipeline.training,
        "deferred_batch_norm": bool(pipeline._deferred),
        "autocast": autocast,
        "the call": call,
        "the kind of device": kind,
        "timeout": None if timeout is None else float(timeout),
        "the checksum of its parameters' names and shapes": checksum,
    }


def checksum_of_parameters(module: nn.Module) -> int:
    """Return a checksum of the names and shapes of a module's parameters."""
    named = []
    for name, p in module.named_parameters():
        shape = None if is_lazy(p) else tuple(p.shape)
        named.append((name, shape))
    return crc32(repr(named).encode())


def check_alike(what: str, own: Settings, theirs: Settings, rank: int, peer: int) -> None:
    """Raise `ValueError` if two ranks make the same call with different settings.

    Args:
        what: The name of the call.
        own: The settings of this rank.
        theirs: The settings of the other rank.
        rank: This rank.
        peer: The other rank.
    """
    for name, value in own.items():
        other = theirs.get(name)
        if repr(value) != repr(other):  # NaN does not equal NaN, but their texts are equal
            raise ValueError(
                f"every rank has to call {what} alike, but {name} is {other!r} on rank {peer} and "
                f"{value!r} on rank {rank}"
            )
