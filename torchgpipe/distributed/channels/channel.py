"""A channel sends messages from one process to another process, in order, over gloo.

With gloo, a receive needs a buffer for the message. If the buffer is too small, the process ends.
If it is too large, only a part of it is filled, without notice. So each message begins with a slot:
a part that fits into a buffer of fixed size, and that describes the other parts, such as large
tensors (message.py). The receiver always has a receive posted (started) for a slot.

It would cost time to post the receives of large tensors only after the slot has arrived. So the
sender and the receiver predict the next message. The receiver posts the receives of the predicted
message's large tensors early, while a task runs. If the prediction is wrong, the sender first sends
an empty tensor to each of these receives.

Three properties of gloo's waits matter here:

- The wait for a message ends when connections are closed (connections.py), but not at Ctrl-C.
- The wait for the end of a send can last for ever, even after the connection has broken. So each
  sender has a thread for these waits. The thread that runs the tasks waits for a queue instead.
- A wait that times out closes all connections of its process group.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed.channels.message import NEVER, Predicted
from torchgpipe.distributed.channels.transfer import Stages, Transfer
from torchgpipe.engine.relay import Stopped

KINDS = (
    "control",
    "forward",
    "backward",
    "forward skips",
    "backward skips",
    "liveness",
    "nothing",
    "loss",
    "tied values",
    "tied gradients",
)
"""The kinds of channels.

The gloo tag of a channel encodes the index of its kind in this tuple, and its two stages.
"""

LARGE = 1 << 30
"""The number that is added to a channel's tag for parts of messages that do not fit into a slot.

These parts need a different tag, because the receive of the next slot is posted before theirs.
"""


class ChannelAddress(NamedTuple):
    """The address of a channel: the other rank, and how to reach it.

    Attributes:
        group: The gloo process group.
        rank: The rank at the other end of the channel.
        tag: The tag of the channel's messages.
        broken: A function that is called with gloo's error if the connection breaks.
        transfer: The transfer of tensors from and to the GPU, or `None` without a GPU.
        limit: How long the receiver waits for a large part of a message. Without a limit, gloo
            would wait for ever if the connection is closed in the middle of a tensor.
    """

    group: dist.ProcessGroup
    rank: int
    tag: int
    broken: Callable[[BaseException], None]
    transfer: Transfer | None = None
    limit: timedelta = NEVER


class End:
    """One end of a channel: the base class of `Sender` and `Receiver`."""

    def __init__(self, address: ChannelAddress) -> None:
        self._group = address.group
        self.rank = address.rank
        self._tag = address.tag
        self._broken = address.broken
        self._transfer = address.transfer
        self._limit = address.limit
        self._predicted = Predicted()

    def begin(self) -> None:
        """Begin a mini-batch, so that both ends of the channel predict the same next message.

        The sender calls this method before it sends a message, and the receiver before it waits for
        the same message.
        """
        self._predicted.begin()

    def _gloo(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of gloo; if it fails, call `broken` and raise `Stopped`."""
        try:
            return function(*given)
        except RuntimeError as error:
            self._broken(error)
            raise Stopped from None


def tag_of(kind: str, stages: Stages) -> int:
    """Return the gloo tag of a channel: a number that marks the channel's messages.

    Every combination of a kind (one of `KINDS`) and two stages has a tag of its own. In `stages`,
    the lower stage comes first.
    """
    low, high = stages
    return KINDS.index(kind) + len(KINDS) * (low << 12 | high)


def bytes_of(content: bytearray) -> Tensor:
    """Return a tensor of bytes that shares the memory of the byte array `content`."""
    return torch.frombuffer(content, dtype=torch.uint8)
