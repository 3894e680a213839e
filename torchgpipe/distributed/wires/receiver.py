"""The end of a wire that receives: `Receiver`. See wire.py."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchgpipe.distributed.wires.cuda import NEVER
from torchgpipe.distributed.wires.layout import placed
from torchgpipe.distributed.wires.message import HEAD, SLOT, Message, places, sizes
from torchgpipe.distributed.wires.wire import LARGE, End, WireAddress, bytes_of

Wait = Callable[..., Any]
"""A function that waits until a receive has ended."""


class _Posted(NamedTuple):
    """A receive that is posted, and the memory that it fills."""

    memory: Tensor
    wait: Wait


class Receiver(End):
    """Receive messages from an address, in order.

    Attributes:
        rank: The rank from which messages come.
    """

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        pinned = self._transfer is not None and self._transfer.pins
        self._row = partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        # With two slots, a receive is posted while this rank works on the content of the other.
        self._slots: deque[tuple[bytearray, Wait]] = deque()
        for _ in range(2):
            self._post_slot(bytearray(SLOT))
        self._taken: bytearray | None = None  # the slot of the last message
        self._large: list[_Posted] = []  # the receives that are posted for the prediction

    def begin(self) -> None:
        """Begin a mini-batch, and post receives for its first message, as predicted."""
        super().begin()
        self._large = self._large or self._posted(self._predicted.large())

    def take(self) -> Message:
        """Wait for the next message."""
        if self._taken is not None:
            self._post_slot(self._taken)
        self._taken, arrived = self._slots.popleft()
        self._gloo(arrived)
        slot = bytes_of(self._taken)
        serial, number, length = HEAD.unpack_from(self._taken)
        predicted = self._predicted
        right = number == predicted.number
        if not right:
            self._await(self._large)  # each of them gets an empty tensor
        if length:
            self._learn(slot, length)
        description = predicted.known[number]
        _, *parts = places([length, *sizes(description)])
        large = self._large
        if not right:
            large = self._posted([size for size, start in parts if start is None])
        filled = iter(large)
        rows: list[Tensor] = []
        for size, start in parts:
            if start is None:
                rows.append(next(filled).memory)
            else:
                content = slot[start : start + size]
                rows.append(self._row(size).copy_(content))
        predicted.note(number)
        self._large = self._posted(predicted.large())
        self._await(large)
        about, layouts = description
        contents = iter(rows)
        on_host = [None if layout is None else placed(layout, contents) for layout in layouts]
        tensors = tuple(on_host)
        if self._transfer is not None:
            tensors = self._transfer.arrive(tensors)
        return Message(serial, about, tensors)

    def _learn(self, slot: Tensor, length: int) -> None:
        """Learn a new description of this many bytes, which is in the slot or comes after it."""
        ((_, start),) = places([length])
        if start is not None:
            description = slot[start : start + length]
        else:
            posted = self._posted([length])
            self._await(posted)
            description = posted[0].memory
        self._predicted.learn(description, self.rank)

    def _post_slot(self, content: bytearray) -> None:
        self._slots.append((content, self._receive(bytes_of(content))))

    def _posted(self, lengths: Sequence[int]) -> list[_Posted]:
        """Post receives of these sizes."""
        posted = []
        for length in lengths:
            memory = self._row(length)
            posted.append(_Posted(memory, self._receive(memory, LARGE)))
        return posted

    def _receive(self, x: Tensor, apart: int = 0) -> Wait:
        """Post a receive; return a function that waits for it."""
        try:
            return self._group.recv([x], self.rank, self._tag | apart).wait
        except RuntimeError as error:
            # The connection is closed, which is all right if nothing more is to come. Only the text
            # of the error is kept: the error would keep frames alive, and so the mini-batch.
            return partial(_fail, str(error))

    def _await(self, posted: Sequence[_Posted]) -> None:
        for each in posted:
            self._gloo(each.wait, self._limit)


def _fail(why: str, limit: timedelta = NEVER) -> NoReturn:
    raise RuntimeError(why)
