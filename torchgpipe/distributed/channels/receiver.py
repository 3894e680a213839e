"""Receive messages from another rank: `Receiver`. The module channel.py explains channels."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchgpipe.distributed.channels.channel import LARGE, ChannelAddress, End, bytes_of
from torchgpipe.distributed.channels.layout import placed
from torchgpipe.distributed.channels.message import HEAD, NEVER, SLOT, Message, places, sizes

Wait = Callable[..., Any]
"""A function that waits until a receive operation has ended."""


class _Posted(NamedTuple):
    """A receive operation that has been started, and the memory that it fills."""

    memory: Tensor
    wait: Wait


class Receiver(End):
    """The receiving end of a channel. Messages arrive in the order of sending.

    Attributes:
        rank: The rank that sends the messages.
    """

    def __init__(self, address: ChannelAddress) -> None:
        super().__init__(address)
        pinned = self._transfer is not None and self._transfer.pins
        self._row = partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        # There are two slots: while this rank reads one slot, a message can arrive in the other.
        self._slots: deque[tuple[bytearray, Wait]] = deque()
        for _ in range(2):
            self._post_slot(bytearray(SLOT))
        # The slot of the last message.
        self._taken: bytearray | None = None
        # The receives of the large parts that are predicted.
        self._large: list[_Posted] = []

    def begin(self) -> None:
        """Begin a mini-batch, and start to receive the large tensors of its first message.

        The sizes of the tensors are predicted from the messages of the previous mini-batch.
        """
        super().begin()
        self._large = self._large or self._posted(self._predicted.large())

    def take(self) -> Message:
        """Wait for the next message, and return it."""
        if self._taken is not None:
            self._post_slot(self._taken)
        self._taken, arrived = self._slots.popleft()
        self._gloo(arrived)
        slot = bytes_of(self._taken)
        serial, number, length = HEAD.unpack_from(self._taken)
        predicted = self._predicted
        right = number == predicted.number
        if not right:
            self._await(self._large)  # the sender sends an empty tensor to each of these receives
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
        """Read a new description from the slot (the first buffer), or receive it after the slot."""
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
        """Start a receive operation for each length, which is a number of bytes."""
        posted = []
        for length in lengths:
            memory = self._row(length)
            posted.append(_Posted(memory, self._receive(memory, LARGE)))
        return posted

    def _receive(self, x: Tensor, apart: int = 0) -> Wait:
        """Start to receive into the tensor `x`; return a function that waits for the arrival."""
        try:
            return self._group.recv([x], self.rank, self._tag | apart).wait
        except RuntimeError as error:
            # The connection is closed. This matters only if the message is needed, so raise the
            # error only when somebody waits for the message. Keep only the error's text, because
            # the error itself would keep its frames, and so the mini-batch, alive.
            return partial(_fail, str(error))

    def _await(self, posted: Sequence[_Posted]) -> None:
        for each in posted:
            self._gloo(each.wait, self._limit)


def _fail(why: str, limit: timedelta = NEVER) -> NoReturn:
    raise RuntimeError(why)
