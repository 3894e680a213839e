"""A wire: messages from one process to another, in order, over gloo.

Gloo needs receives of the right size. A buffer that is too small ends the process, and one that is
too large is filled in part without notice. So the receiver always has a receive posted for a slot,
which says what else comes (message.py). Posting the receives of large tensors only then would cost
time in which nothing moves. So both ends predict the next message, and the receiver posts the
receives for its large tensors at once, while a task runs. If the prediction was wrong, the sender
first sends an empty tensor to each of these receives.

Sending returns at once, and the thread that takes a message waits for gloo. Such a wait ends when
connections are closed (connections.py), but not by Ctrl-C. A wait that times out closes all
connections of its group. A wait for the end of sending may go on even after the connection has
broken. So each sender has a thread for these waits, and programs wait for a queue.
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
"""A part that does not fit into a slot has a tag of its own, to which this number is added.

Receives of slots are posted further ahead than receives of such parts.
"""


class WireAddress(NamedTuple):
    """Where a wire goes.

    Attributes:
        group: The gloo process group.
        rank: The rank to which, or from which, messages go.
        tag: The tag of the wire's messages.
        broken: A function that is called with gloo's error if the connection breaks.
        transfer: How tensors travel between GPUs, or `None` without GPUs.
        limit: How long a tensor may take that comes after its slot. Gloo wakes nobody who waits for
            a tensor of which a part has arrived when its connection closes.
    """

    group: dist.ProcessGroup
    rank: int
    tag: int
    broken: Callable[[BaseException], None]
    transfer: Transfer | None = None
    limit: timedelta = NEVER


class End:
    """One end of a wire."""

    def __init__(self, address: WireAddress) -> None:
        self._group = address.group
        self.rank = address.rank
        self._tag = address.tag
        self._broken = address.broken
        self._transfer = address.transfer
        self._limit = address.limit
        self._predicted = Predicted()

    def begin(self) -> None:
        """Begin a mini-batch; both ends do so between the same messages."""
        self._predicted.begin()

    def _gloo(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of gloo, which fails if a connection has broken."""
        try:
            return function(*given)
        except RuntimeError as error:
            self._broken(error)
            raise Stopped from None


def bytes_of(content: bytearray) -> Tensor:
    """Return a tensor that shares its memory with an array of bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)
