"""Send messages to another rank: `Sender`. The module channel.py explains channels."""

import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.channels.channel import LARGE, ChannelAddress, End, bytes_of
from torchgpipe.distributed.channels.layout import dense, disjoint, layout_of, once, row
from torchgpipe.distributed.channels.message import HEAD, Description, Message, described, places
from torchgpipe.distributed.channels.transfer import Departure
from torchgpipe.engine.relay import Stopped
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat


class Sender(End):
    """The sending end of a channel. Messages are sent in order.

    Attributes:
        rank: The rank that receives the messages.
        thread: The thread that waits until the other rank has received the messages.
    """

    def __init__(self, address: ChannelAddress) -> None:
        super().__init__(address)
        # Messages that are held back and sent later, with the versions of their tensors.
        self._held: deque[tuple[Message, list[int | None]]] = deque()
        # For each message that the thread was given, a function that waits until the message is
        # received. On a GPU, this function also sends the message first.
        self._departed: SimpleQueue[Callable[[], BaseException | None] | None] = SimpleQueue()
        # For each message that was received, an error or `None`.
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        # The number of messages that the thread was given, without those that `settle` has seen
        # received.
        self._under_way = 0
        self._last: list[Any] = []  # keeps the operations of the final message alive
        self._numbers: dict[Description, int] = {}
        name = f"gpipe-to-{address.rank}"
        self.thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self.thread.start()

    def give(self, message: Message) -> None:
        """Send a message, and do not wait until it is received."""
        # The versions are recorded now, because the tensors must not change before they are sent.
        self._held.append((message, versions(message.tensors)))
        if self._transfer is None or len(self._held) > self._transfer.late:
            self._depart()

    def give_last(self, message: Message) -> None:
        """Send a message, and do not check its arrival: the other rank may have disconnected."""
        self._last = self._post(message)

    def release(self) -> None:
        """Send all delayed messages. Call this method after the last message was given."""
        while self._held:
            self._depart()

    def settle(self, left: int = 0, patience: float | None = None) -> None:
        """Wait until all sent messages have been received, except for at most `left` of them.

        Raises:
            queue.Empty: If a message is not received within `patience` seconds.
        """
        while self._under_way > left:
            error = self._ended.get(timeout=patience)
            if error is not None:
                # Keep the error for later calls. Raise a copy, because a raised error keeps frames.
                self._ended.put(error)
                raise copy(error)
            self._under_way -= 1

    def settled(self) -> bool:
        """Return, without waiting, whether all messages that were sent have been received."""
        self.settle(max(0, self.pending))
        return not self._under_way

    @property
    def pending(self) -> int:
        """How many messages were sent and are not received yet; any thread can read this."""
        return self._under_way - self._ended.qsize()

    def stop(self) -> None:
        """End the sender's thread; calls of `settle` that wait, now or later, raise `Stopped`."""
        self._ended.put(Stopped())
        self._departed.put(None)

    def _depart(self) -> None:
        """Send the first of the delayed messages."""
        message, before = self._held.popleft()
        works: list[Any] | None = None
        if self._transfer is None:
            departure = Departure(message.tensors)
            leaving = message
            works = self._post(message)
        else:
            # Leave the message to the sender's thread, which waits until the GPU has made the
            # tensors. The thread that runs the tasks must not wait for the GPU.
            departure = self._transfer.depart(message.tensors)
            leaving = message._replace(tensors=departure.tensors)
        self._under_way += 1
        received = partial(self._received, leaving, works, departure, message.tensors, before)
        self._departed.put(received)

    def _wait(self) -> None:
        """Wait until each message is received, and send it first if it is from a GPU.

        The sender's thread runs this method.
        """
        try:
            if self._transfer is not None:
                self._transfer.begin()
            while (received := self._departed.get()) is not None:
                self._ended.put(received())
                del received  # it keeps the tensors alive
        except BaseException as error:
            # The traceback keeps frames alive, and so this sender and the tensors.
            error.__traceback__ = error.__context__ = None
            self._ended.put(error)

    def _received(
        self,
        leaving: Message,
        works: list[Any] | None,
        departure: Departure,
        tensors: Flat,
        before: list[int | None],
    ) -> BaseException | None:
        """Wait until the other rank has received a message, after sending it if necessary.

        Args:
            leaving: The message in the form in which gloo sends it. For example, GPU tensors are
                replaced by copies in CPU memory.
            works: The running send operations of gloo, or `None` if nothing is sent yet.
            departure: The GPU events to wait for before and after the message is sent.
            tensors: The tensors of the message, which `give` was called with.
            before: PyTorch's version counters of these tensors when `give` was called. A counter
                increases at each in-place change of the tensor.

        Returns:
            An error if one of the tensors was changed in place before it was sent, or `None`.
        """
        if departure.before is not None:
            departure.before.synchronize()
        if works is None:
            works = self._post(leaving)
        for work in works:
            self._gloo(work.wait)
        if departure.after is not None:
            departure.after.synchronize()
        if versions(tensors) == before:
            return None
        return RuntimeError(
            f"a tensor for rank {self.rank} was changed in place before it was sent: a layer "
            "returns memory that it uses again (a buffer) for the next micro-batch; return a copy "
            "(x.clone())"
        )

    def _post(self, message: Message) -> list[Any]:
        """Send a message as bytes: the slot (its first buffer), and parts that do not fit into it.

        Returns:
            The operations of gloo; the caller has to wait for them.
        """
        predicted = self._predicted
        flat = [None if x is None else disjoint(x) for x in message.tensors]
        layouts = [None if x is None else layout_of(x) for x in flat]
        description = message.about, tuple(layouts)
        number = self._numbers.setdefault(description, len(predicted.known))
        length = 0
        parts: list[Tensor] = []
        if number == len(predicted.known):
            new = described(*description)
            length = len(new)
            parts.append(new)
            predicted.known.append(description)
        # If the prediction is wrong, each receive that was posted in vain gets an empty tensor.
        unused = 0 if number == predicted.number else len(predicted.large())
        predicted.note(number)
        filled = [x for x in flat if x is not None and not x.is_meta and x.numel()]
        parts += [row(dense(once(x))) for x in filled]
        head = HEAD.pack(message.serial, number, length)
        small = [bytes_of(bytearray(head))]
        large: list[Tensor] = []
        for part, (_, start) in zip(parts, places(map(len, parts)), strict=True):
            if start is None:
                large.append(part)
            else:
                small.append(part)
        slot = torch.cat(small)
        apart = [slot[:0]] * unused + large
        return [self._send(slot), *[self._send(part, LARGE) for part in apart]]

    def _send(self, part: Tensor, apart: int = 0) -> Any:
        return self._gloo(self._group.send, [part], self.rank, self._tag | apart)
