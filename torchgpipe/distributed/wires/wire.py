"""A wire sends messages from one process to another process, in order, over gloo.

With gloo, a receive needs a buffer of the right size. If the buffer is too small, the process ends.
If the buffer is too large, a part of it is filled without notice. So the receiver always has a
receive posted for a slot of fixed size, which describes the rest of the message (message.py). If
the receives of large tensors were posted only after the slot arrives, this would cost time. So the
sender and the receiver predict the next message, and the receiver posts the receives of its large
tensors early, while a task runs. If the prediction is wrong, the sender first sends an empty tensor
to each of these receives.

A send returns immediately. The thread that takes a message waits for gloo. This wait ends when
connections are closed (connections.py), but not when the user presses Ctrl-C. A wait that times out
closes all connections of its group. A wait for the end of a send can last for ever, even after the
connection has broken. So each sender has a thread for these waits, and a program waits for a queue
instead.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed.wires.cuda import NEVER, Transfer
from torchgpipe.distributed.wires.message import Predicted
from torchgpipe.engine.relay import Stopped

LARGE = 1 << 30
"""The number that is added to a wire's tag for parts of messages that do not fit into a slot.

These parts need a different tag, because receives of slots are posted earlier.
"""


class WireAddress(NamedTuple):
    """The address of a wire (a message channel): the other rank, and how to reach it.

    Attributes:
        group: The gloo process group.
        rank: The rank at the other end of the wire.
        tag: The tag of the wire's messages.
        broken: A function that is called with gloo's error if the connection breaks.
        transfer: The transfer of tensors from and to the GPU, or `None` without a GPU.
        limit: How long the receiver waits for a large part of a message. The limit is needed
            because gloo does not end the wait for a half received tensor when a connection closes.
    """

    group: dist.ProcessGroup
    rank: int
    tag: int
    broken: Callable[[BaseException], None]
    transfer: Transfer | None = None
    limit: timedelta = NEVER


class End:
    """One end of a wire: the base class of `Sender` and `Receiver`."""

    def __init__(self, address: WireAddress) -> None:
        self._group = address.group
        self.rank = address.rank
        self._tag = address.tag
        self._broken = address.broken
        self._transfer = address.transfer
        self._limit = address.limit
        self._predicted = Predicted()

    def begin(self) -> None:
        """Begin a mini-batch; sender and receiver call this method between the same messages."""
        self._predicted.begin()

    def _gloo(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of gloo; if it fails, report a broken connection and raise `Stopped`."""
        try:
            return function(*given)
        except RuntimeError as error:
            self._broken(error)
            raise Stopped from None


def bytes_of(content: bytearray) -> Tensor:
    """Return a tensor that shares its memory with an array of bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)
