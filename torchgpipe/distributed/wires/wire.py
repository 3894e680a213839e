"""A wire: messages from one process to another, in order, over gloo.

Gloo asks for receives of the right size: a buffer that is too small ends the process, and one that is too large is
filled in part without a word. So the receiver always has a receive posted for a slot, which says what else comes
(message.py). To post the receives of large tensors only then would cost time in which nothing moves. So both ends
predict the next message, and the receiver posts the receives for its large tensors at once, while a task runs. Where
the prediction turns out wrong, the sender first sends an empty tensor to each of these receives.

Sending returns at once, and whoever takes a message waits for gloo. Such a wait ends when connections are closed (see
connections.py), and not by Ctrl-C. One that times out closes all connections of its group. A wait for sending to end
may go on even when the connection has broken, so each sender has a thread for it, and programs wait for a queue.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed.wires.cuda import NEVER, Departure, Transfer
from torchgpipe.distributed.wires.layout import dense, disjoint, layout_of, once, placed, row
from torchgpipe.distributed.wires.message import (
    HEAD,
    SLOT,
    Description,
    Message,
    Predicted,
    described,
    places,
    sizes,
)
from torchgpipe.engine.relay import Stopped
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat

LARGE = 1 << 30
"""Is added to the tag of what does not fit into the slot: receives of slots are posted further ahead."""


class WireAddress(NamedTuple):
    """Where a wire goes: to or from `rank` of a group, by messages with this tag, and their tensors by `transfer`.

    `broken` is called with what gloo raises if the connection breaks. What comes with a slot may take as long as
    `limit`: gloo wakes nobody who waits for a tensor of which a part has arrived when its connection closes.
    """

    group: dist.ProcessGroup
    rank: int
    tag: int
    broken: Callable[[BaseException], None]
    transfer: Transfer | None = None
    limit: timedelta = NEVER


class _End:
    """One end of a wire."""

    def __init__(self, address: WireAddress) -> None:
        self._group, self._rank, self._tag, self._broken, self._transfer, self._limit = address
        self._predicted = Predicted()

    def begin(self) -> None:
        """Begin a mini-batch. Both ends do so between the same messages."""
        self._predicted.begin()

    def _gloo(self, what: Callable[..., Any], *given: Any) -> Any:
        """Do something that fails if a connection has broken."""
        try:
            return what(*given)
        except RuntimeError as error:
            self._broken(error)
            raise Stopped from None


class Sender(_End):
    """Send messages to an address, in order."""

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        self._held: deque[tuple[Message, list[int | None]]] = deque()
        self._departed: SimpleQueue[Callable[[], BaseException | None] | None] = SimpleQueue()
        self._under_way = 0  # messages that have departed, and of which `settle` does not know that they were received
        self._ended: SimpleQueue[BaseException | None] = (
            SimpleQueue()
        )  # for each of them, whether all was right
        self._last: list[Any] = []  # what is under way has to live
        self._numbers: dict[Description, int] = {}
        self.thread = threading.Thread(
            target=self._wait, name=f"gpipe-to-{address.rank}", daemon=True
        )
        self.thread.start()

    def give(self, message: Message) -> None:
        """Send a message, and do not wait until it is received."""
        # The versions of now: a layer must not change the tensors before they are sent.
        self._held.append((message, versions(message.tensors)))
        if self._transfer is None or len(self._held) > self._transfer.late:
            self._depart()

    def give_last(self, message: Message) -> None:
        """Send a message, and never wait until it is received: the other rank may be about to close the connection."""
        self._last = self._post(message)

    def release(self) -> None:
        """Let the messages leave that would leave later: the program has no more tasks."""
        while self._held:
            self._depart()

    def settle(self, left: int = 0, patience: float | None = None) -> None:
        """Wait until all messages that have departed are received, but for `left` of them.

        If another one takes longer than `patience` seconds, `queue.Empty` is raised.
        """
        while self._under_way > left:
            error = self._ended.get(timeout=patience)
            if error is not None:
                self._ended.put(error)  # for whoever waits again
                raise copy(
                    error
                )  # and not what stays here: it would keep the frames that it comes through alive
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
        """End every wait, now and later, and the thread."""
        self._ended.put(Stopped())
        self._departed.put(None)

    def _depart(self) -> None:
        message, before = self._held.popleft()
        departure = (
            Departure(message.tensors)
            if self._transfer is None
            else self._transfer.depart(message.tensors)
        )
        leaving = message._replace(tensors=departure.tensors)
        # From a GPU it is sent when a stream has got there, for which the thread of the program must not wait.
        works = self._post(leaving) if self._transfer is None else None
        self._under_way += 1
        self._departed.put(
            partial(self._received, leaving, works, departure, message.tensors, before)
        )

    def _wait(self) -> None:
        """Wait, in a thread, until each message is received."""
        try:
            if self._transfer is not None:
                self._transfer.begin()
            while (received := self._departed.get()) is not None:
                self._ended.put(received())
                del received  # and the tensors
        except BaseException as error:
            error.__traceback__ = error.__context__ = (
                None  # their frames keep this sender, and what it was to send
            )
            self._ended.put(error)

    def _received(
        self,
        leaving: Message,
        works: list[Any] | None,
        departure: Departure,
        tensors: Flat,
        before: list[int | None],
    ) -> BaseException | None:
        if departure.before is not None:
            departure.before.synchronize()
        for work in self._post(leaving) if works is None else works:
            self._gloo(work.wait)
        if departure.after is not None:
            departure.after.synchronize()
        if versions(tensors) == before:
            return None
        return RuntimeError(
            f"an input of partition {self._rank} was changed in place before it was sent: a layer returns memory "
            "that it uses again (a buffer) for the next micro-batch; return a copy (x.clone())"
        )

    def _post(self, message: Message) -> list[Any]:
        """Send a message's parts, as bytes: the slot, and what does not fit into it."""
        flat = [None if x is None else disjoint(x) for x in message.tensors]
        description = message.about, tuple([None if x is None else layout_of(x) for x in flat])
        predicted = self._predicted
        number = self._numbers.setdefault(description, len(predicted.known))
        new = [described(*description)] if number == len(predicted.known) else []
        predicted.known += [description] * len(new)
        unused = (
            0 if number == predicted.number else len(predicted.large())
        )  # receives that are posted in vain
        predicted.note(number)
        parts = new + [
            row(dense(once(x))) for x in flat if x is not None and not x.is_meta and x.numel()
        ]
        small, large = (
            [_bytes(bytearray(HEAD.pack(message.serial, number, sum(map(len, new)))))],
            list[Tensor](),
        )
        for part, (_, start) in zip(parts, places(map(len, parts)), strict=True):
            (large if start is None else small).append(part)
        slot = torch.cat(small)
        sent = [(slot, 0), *((part, LARGE) for part in (*[slot[:0]] * unused, *large))]
        return [
            self._gloo(self._group.send, [part], self._rank, self._tag | apart)
            for part, apart in sent
        ]


class Receiver(_End):
    """Receive messages from an address, in order."""

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        pinned = self._transfer is not None and self._transfer.pins
        self._row = partial(torch.empty, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        # Two, so that a receive is posted while this rank works, and none has to be before its next task.
        self._slots = deque(
            (content, self._receive(_bytes(content)))
            for content in (bytearray(SLOT), bytearray(SLOT))
        )
        self._taken: bytearray | None = None
        self._large: list[
            tuple[Tensor, Callable[..., Any]]
        ] = []  # receives that are posted for the prediction

    def begin(self) -> None:
        """Begin a mini-batch, and post receives for what it is predicted to begin with."""
        super().begin()
        self._large = self._large or self._posted(self._predicted.large())

    def take(self) -> Message:
        """Wait for the next message."""
        if self._taken is not None:
            self._slots.append((self._taken, self._receive(_bytes(self._taken))))
        self._taken, arrived = self._slots.popleft()
        self._gloo(arrived)
        slot = _bytes(self._taken)
        serial, number, length = HEAD.unpack_from(self._taken)
        predicted = self._predicted
        right = number == predicted.number
        if not right:
            self._wait(self._large)  # until each has got its empty tensor
        if length:
            ((_, at),) = places([length])
            apart = self._posted([length] * (at is None))
            self._wait(apart)
            predicted.learn(apart[0][0] if at is None else slot[at:][:length], self._rank)
        about, layouts = description = predicted.known[number]
        _, *parts = places([length, *sizes(description)])
        large = (
            self._large if right else self._posted([size for size, start in parts if start is None])
        )
        filled = iter(large)
        rows = [
            next(filled)[0] if at is None else self._row(size).copy_(slot[at:][:size])
            for size, at in parts
        ]
        predicted.note(number)
        self._large = self._posted(predicted.large())
        self._wait(large)
        contents = iter(rows)
        tensors = tuple(
            [None if layout is None else placed(layout, contents) for layout in layouts]
        )
        return Message(
            serial, about, tensors if self._transfer is None else self._transfer.arrive(tensors)
        )

    def _posted(self, lengths: Sequence[int]) -> list[tuple[Tensor, Callable[..., Any]]]:
        """Post receives of these sizes; return memory, and what waits until it is filled."""
        return [(x, self._receive(x, LARGE)) for x in map(self._row, lengths)]

    def _receive(self, x: Tensor, apart: int = 0) -> Callable[..., Any]:
        try:
            return self._group.recv([x], self._rank, self._tag | apart).wait
        except (
            RuntimeError
        ) as error:  # the connection is closed: no matter, if nothing more is to come
            # Its text: the error would keep the frames that it has come through alive, and so all of the mini-batch.
            return partial(_fail, str(error))

    def _wait(self, posted: Sequence[tuple[Tensor, Callable[..., Any]]]) -> None:
        for _, wait in posted:
            self._gloo(wait, self._limit)


def _fail(why: str, limit: timedelta = NEVER) -> NoReturn:
    raise RuntimeError(why)


def _bytes(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)
