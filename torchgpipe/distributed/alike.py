"""Compare the settings of a pipeline that have to be the same on all ranks."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchgpipe.distributed.channels.message import Message
from torchgpipe.distributed.liveness.liveness import EQUALLY_OFTEN
from torchgpipe.partitioned import Partitioned

Settings = Mapping[str, Any]
"""Maps the name of a setting, as error messages write it, to the setting's value."""

_METHODS = ("clip_grad_norm_", "save", "load", "record")
"""What all ranks of a pipeline have to call, beside the methods that run a mini-batch."""


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


def in_other_mini_batches(
    rank: int, serial: int, what: str | None, peer: int, message: Message
) -> RuntimeError:
    """Return the error for two ranks in different mini-batches, one of which has left out a call.

    Args:
        rank: The number of this rank.
        serial: The number of the mini-batch that this rank has begun last.
        what: The name of the message that this rank waits for, or `None` if the message has no
            name. If a method such as `save` sends the message, the message has the name of the
            method.
        peer: The number of the other rank.
        message: The message that the other rank has sent.
    """
    told = message.about[0] if what else None
    return RuntimeError(
        f"rank {peer} is in {_place(message.serial, told)}, but rank {rank} is in "
        f"{_place(serial, what)}: {EQUALLY_OFTEN}; after a failure, call close() on all ranks"
    )


def _place(serial: int, what: str | None) -> str:
    return f"{what}() after mini-batch {serial}" if what in _METHODS else f"mini-batch {serial}"
