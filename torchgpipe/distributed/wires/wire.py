"""A wire: messages of tensors from one process to another, over gloo.

A message is a description and tensors. The description says everything but the tensors' contents: shapes, types,
and whatever the sender adds. Each wire numbers its descriptions and sends each one once, so that a message is

    a slot of at most 64 KiB:   serial | number of the description | its length, if it is new | it | small tensors
    large tensors, one by one   where they do not fit into the slot

The receiver is always ready for a slot, which says what else comes. Gloo leaves no other way: a buffer that is too
small ends the process, and one that is too large is filled in part without a word. But to ask for a large tensor only
then costs time in which nothing moves. So while a task runs, the receiver is ready for the tensors, too, that the
message at this place had in the mini-batch before. The sender knows that. If its message is another one, it first sends
an empty tensor for each of them.

Sending returns at once, and whoever takes a message waits for gloo. Such a wait ends when connections are closed (see
wires.py), and not by Ctrl-C. One that times out closes all connections of its group. A wait for sending to end may go
on even when the connection has broken, so each wire has a thread for it, and programs wait for a queue.
"""

import pickle
import struct
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.distributed.wires.cuda import NEVER, Departure, Transfer
from torchgpipe.distributed.wires.layout import (
    SLOT,
    Layout,
    Memory,
    dense,
    disjoint,
    layout_of,
    once,
    placed,
    places,
    row,
)
from torchgpipe.engine.relay import Stopped
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat

_HEAD = struct.Struct("<qqq")


class Message(NamedTuple):
    """Tensors, some of them `None`, and what is said of them. `serial` tells mini-batches apart."""

    serial: int
    about: Any
    tensors: Flat


_Description = tuple[Hashable, tuple[Layout | None, ...]]


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
    """One end of a wire, and which description the next message has, if all is as in the mini-batch before.

    The sender calls `begin` and `give`, the receiver `begin` and `take`, and both in one order. So both always expect
    the same description.
    """

    def __init__(self, address: WireAddress) -> None:
        self._group, self._rank, self._tag, self._broken, self._transfer, self._limit = address
        self._known: list[_Description] = []
        self._before: list[int] = []  # numbers of the descriptions in the mini-batch before
        self._now: list[int] = []
        self._expected: int | None = None

    def begin(self) -> None:
        """Begin a mini-batch. Both ends do so between the same messages."""
        self._before, self._now = self._now, []
        self._look_ahead()

    def _seen(self, number: int) -> None:
        self._now.append(number)
        self._expected = None
        self._look_ahead()

    def _look_ahead(self) -> None:
        if self._expected is None and len(self._now) < len(self._before):
            self._expected = self._before[len(self._now)]

    def _ahead(self) -> list[int]:
        """Return the sizes of the large tensors of the message that is expected."""
        layouts = () if self._expected is None else self._known[self._expected][1]
        return [size for size, place in places(layouts, _HEAD.size) if place is None]

    def _gloo(self, what: Callable[..., Any], *given: Any) -> Any:
        """Do something that fails if a connection has broken."""
        try:
            return what(*given)
        except RuntimeError as error:
            self._broken(error)
            raise Stopped from None


class _Posted(NamedTuple):
    """A message that has departed, what to wait for, and its tensors as the program has them, with their versions."""

    message: Message
    works: list[Any] | None
    departure: Departure
    tensors: Flat
    before: list[int | None]


class Sender(_End):
    """Send messages by a address, in order.

    Attributes:
        sent: bytes of tensors that were sent; headers and descriptions are not counted.
    """

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        self._held: deque[tuple[Message, list[int | None]]] = deque()
        self._posted: SimpleQueue[_Posted | None] = SimpleQueue()
        self._under_way = 0  # messages that have departed, and of which `settle` does not know that they were received
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()  # for each of them, whether all was right
        self._last: list[Any] = []  # what is under way has to live
        self._numbers: dict[_Description, int] = {}
        self.sent = 0
        self.thread = threading.Thread(target=self._wait, name=f"gpipe-to-{address.rank}", daemon=True)
        self.thread.start()

    @property
    def described(self) -> int:
        """How many descriptions were sent."""
        return len(self._numbers)

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

    def settle(self, left: int = 0) -> None:
        """Wait until at most `left` messages that have departed are not received."""
        while self._under_way > left:
            error = self._ended.get()
            if error is not None:
                self._ended.put(error)  # for whoever waits again
                raise copy(error)  # and not what stays here: it would keep the frames that it comes through alive
            self._under_way -= 1

    def settled(self) -> bool:
        """Return, without waiting, whether all messages that have departed were received."""
        self.settle(max(0, self._under_way - self._ended.qsize()))
        return not self._under_way

    def stop(self) -> None:
        """End every wait, now and later, and the thread."""
        self._ended.put(Stopped())
        self._posted.put(None)

    def _depart(self) -> None:
        message, before = self._held.popleft()
        tensors = message.tensors
        departure = Departure(tensors) if self._transfer is None else self._transfer.depart(tensors)
        message = message._replace(tensors=departure.tensors)
        # From a GPU it is sent when a stream has got there, for which the thread of the program must not wait.
        works = self._post(message) if self._transfer is None else None
        self._under_way += 1
        self.sent += sum(once(x.detach()).nbytes for x in tensors if x is not None and x.layout is torch.strided)
        self._posted.put(_Posted(message, works, departure, tensors, before))

    def _wait(self) -> None:
        """Wait, in a thread, until each message is received."""
        try:
            if self._transfer is not None:
                self._transfer.begin()
            while (posted := self._posted.get()) is not None:
                self._ended.put(self._end(*posted))
                del posted  # and the tensors
        except BaseException as error:
            error.__traceback__ = error.__context__ = None  # their frames keep this sender, and what it was to send
            self._ended.put(error)

    def _end(
        self, message: Message, works: list[Any] | None, departure: Departure, tensors: Flat, before: list[int | None]
    ) -> BaseException | None:
        if departure.before is not None:
            departure.before.synchronize()
        for work in self._post(message) if works is None else works:
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
        return [self._gloo(self._group.send, [part], self._rank, self._tag) for part in self._parts(message)]

    def _parts(self, message: Message) -> list[Tensor]:
        """Return what to send, as bytes: the slot, then what does not fit into it."""
        flat = [None if x is None else disjoint(x) for x in message.tensors]
        layouts = tuple([None if x is None else layout_of(x) for x in flat])
        description = (message.about, layouts)
        number, new = self._numbers.get(description), b""
        if number is None:
            number, new = len(self._known), pickle.dumps(description)
            self._numbers[description] = number
            self._known.append(description)
        fillers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in self._ahead() if number != self._expected]
        self._seen(number)
        slot, at = [_bytes(_HEAD.pack(message.serial, number, len(new)))], _HEAD.size
        large: list[Tensor] = []
        if new:
            fits = at + len(new) <= SLOT
            (slot if fits else large).append(_bytes(new))
            at += len(new) * fits
        sent = [x for x, layout in zip(flat, layouts, strict=True) if x is not None and layout and layout.bytes]
        rows = [row(dense(once(x))) for x in sent]
        for x, (_, place) in zip(rows, places(layouts, at), strict=True):
            (large if place is None else slot).append(x)
        return [torch.cat(slot), *fillers, *large]


class Receiver(_End):
    """Receive messages by a address, in order."""

    def __init__(self, address: WireAddress) -> None:
        super().__init__(address)
        self._memory = Memory(pinned=self._transfer is not None and self._transfer.pins)
        self._content = bytearray(SLOT)
        self._slot = torch.frombuffer(self._content, dtype=torch.uint8)
        self._next = self._receive(self._slot)
        self._large: list[tuple[Tensor, Any]] = []  # tensors of the message that is expected, and the waits for them

    def begin(self) -> None:
        """Begin a mini-batch, and post receives for what it is expected to begin with."""
        ready = self._expected is not None
        super().begin()
        if not ready:
            self._prepare()

    def take(self) -> Message:
        """Wait for the next message."""
        self._gloo(self._next.wait)
        serial, number, length = _HEAD.unpack_from(self._content)
        at = _HEAD.size
        large, as_expected = self._large, number == self._expected
        if not as_expected:
            self._wait(large)
        if length:
            if at + length <= SLOT:
                new, at = self._content[at : at + length], at + length
            else:
                new = bytearray(length)
                self._gloo(self._receive(torch.frombuffer(new, dtype=torch.uint8)).wait, self._limit)
            self._known.append(pickle.loads(new))
        about, layouts = self._known[number]
        parts = [*places(layouts, at)]
        if not as_expected:
            large = self._received([size for size, place in parts if place is None])
        apart = iter(large)
        rows = [next(apart)[0] if at is None else self._slot[at : at + size].clone() for size, at in parts]
        self._seen(number)
        self._next = self._receive(self._slot)
        self._prepare()
        self._wait(large)
        remaining = iter(rows)
        tensors = tuple([None if layout is None else placed(layout, remaining) for layout in layouts])
        return Message(serial, about, tensors if self._transfer is None else self._transfer.arrive(tensors))

    def _prepare(self) -> None:
        self._large = self._received(self._ahead())

    def _received(self, sizes: Sequence[int]) -> list[tuple[Tensor, Any]]:
        rows = [self._memory.row(size) for size in sizes]
        return [(x, self._receive(x)) for x in rows]

    def _receive(self, x: Tensor) -> Any:
        try:
            return self._group.recv([x], self._rank, self._tag)
        except RuntimeError as error:  # the connection is closed: no matter, if nothing more is to come
            return _Never(str(error))

    def _wait(self, received: Sequence[tuple[Tensor, Any]]) -> None:
        for _, work in received:
            self._gloo(work.wait, self._limit)


class _Never(NamedTuple):
    """What stands for an operation that could not begin.

    It keeps a text, since an error would keep the frames that it has come through alive, and so all of the mini-batch.
    """

    why: str

    def wait(self, limit: timedelta = NEVER) -> None:
        raise RuntimeError(self.why)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
