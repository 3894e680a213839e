"""Compare the settings of a pipeline that have to be the same on all ranks."""

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

    At the beginning of each mini-batch, the ranks compare these settings.

    Args:
        pipeline: This rank's pipeline.
        order: The name of the schedule, followed by a checksum if the user has made the schedule.
        timeout: The timeout of the pipeline, in seconds; `None` for no limit.
        checksum: A checksum of the names and shapes of the model's parameters. It differs between
            ranks that run different models. This happens, for example, if a script makes two
            pipelines, and one rank makes them in another order than the other ranks.
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
        what: The name of the call, for the error message.
        own: The settings of this rank: their names and values.
        theirs: The settings of the other rank.
        rank: The number of this rank.
        peer: The number of the other rank.
    """
    for name, value in own.items():
        other = theirs.get(name)
        if repr(value) != repr(other):  # NaN does not equal NaN, but their texts are equal
            raise ValueError(
                f"every rank has to call {what} with the same settings, but {name} is {other!r} on "
                f"rank {peer} and {value!r} on rank {rank}"
            )
