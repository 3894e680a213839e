"""The end of a wire that sends: `Sender`. See wire.py."""

import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from torchgpipe.distributed.wires.cuda import Departure
from torchgpipe.distributed.wires.layout import dense, disjoint, layout_of, once, row
from torchgpipe.distributed.wires.message import HEAD, Description, Message, described, places
from torchgpipe.distributed.wires.wire import LARGE, End, WireAddress, bytes_of
from torchgpipe.engine.relay import Stopped
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat


class Sender(End):
    """Send messages to an address, in order.

    Attributes:
        rank: The rank to which messages go.
        thread: The thread that waits until messages are received.
    """

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        # Messages that leave later, with the versions of their tensors.
        self._held: deque[tuple[Message, list[int | None]]] = deque()
        # For each message that has departed, a function that waits until it is received.
        self._departed: SimpleQueue[Callable[[], BaseException | None] | None] = SimpleQueue()
        # For each message that was received, what was wrong with it.
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        # The number of messages that have departed, and of whose end `settle` does not know.
        self._under_way = 0
        self._last: list[Any] = []  # the operations of the last message, which have to live
        self._numbers: dict[Description, int] = {}
        name = f"gpipe-to-{address.rank}"
        self.thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self.thread.start()

    def give(self, message: Message) -> None:
        """Send a message, and do not wait until it is received."""
        # The versions are noted now: a layer must not change the tensors before they are sent.
        self._held.append((message, versions(message.tensors)))
        if self._transfer is None or len(self._held) > self._transfer.late:
            self._depart()

    def give_last(self, message: Message) -> None:
        """Send a message that nobody waits for, since the other rank may close the connection."""
        self._last = self._post(message)

    def release(self) -> None:
        """Let all messages leave that are held back, because the program has no more tasks."""
        while self._held:
            self._depart()

    def settle(self, left: int = 0, patience: float | None = None) -> None:
        """Wait until all messages that have departed are received, except `left` of them.

        Raises:
            queue.Empty: If a message takes longer than `patience` seconds.
        """
        while self._under_way > left:
            error = self._ended.get(timeout=patience)
            if error is not None:
                self._ended.put(error)  # for a later call of `settle`
                # The error that stays here must not be raised. It would keep the frames alive that
                # it comes through.
                raise copy(error)
            self._under_way -= 1

    def settled(self) -> bool:
        """Return, without waiting, whether all messages that have departed were received."""
        self.settle(max(0, self.pending))
        return not self._under_way

    @property
    def pending(self) -> int:
        """How many messages have departed and are not received yet; any thread may ask."""
        return self._under_way - self._ended.qsize()

    def stop(self) -> None:
        """End the thread, and every wait, now and later."""
        self._ended.put(Stopped())
        self._departed.put(None)

    def _depart(self) -> None:
        """Let the first of the messages that are held back leave."""
        message, before = self._held.popleft()
        works: list[Any] | None = None
        if self._transfer is None:
            departure = Departure(message.tensors)
            leaving = message
            works = self._post(message)
        else:
            # The message is sent when the GPU's stream has got there. The thread of the program
            # must not wait for that.
            departure = self._transfer.depart(message.tensors)
            leaving = message._replace(tensors=departure.tensors)
        self._under_way += 1
        received = partial(self._received, leaving, works, departure, message.tensors, before)
        self._departed.put(received)

    def _wait(self) -> None:
        """Wait, in the thread, until each message is received."""
        try:
            if self._transfer is not None:
                self._transfer.begin()
            while (received := self._departed.get()) is not None:
                self._ended.put(received())
                del received  # it holds the tensors
        except BaseException as error:
            # The frames keep this sender alive, and the tensors that it was to send.
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
        """Wait until a message is received; return an error if it was changed meanwhile.

        Args:
            leaving: The message as it goes over gloo.
            works: The operations of gloo, or `None` if the message is not sent yet.
            departure: The CUDA events to wait for.
            tensors: The tensors that were given.
            before: The versions of these tensors at that time.
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
            f"an input of partition {self.rank} was changed in place before it was sent: a layer "
            "returns memory that it uses again (a buffer) for the next micro-batch; return a copy "
            "(x.clone())"
        )

    def _post(self, message: Message) -> list[Any]:
        """Send a message as bytes: the slot, and the parts that do not fit into it.

        Returns:
            The operations of gloo, which have to be waited for.
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
        # If the prediction is wrong, the receiver has posted receives in vain.
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
