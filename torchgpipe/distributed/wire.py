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
links.py), and not by Ctrl-C. One that times out closes all connections of its group. A wait for sending to end may go
on even when the connection has broken, so each wire has a thread for it, and programs wait for a queue.
"""

from __future__ import annotations

import mmap
import pickle
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.item import versions
from torchgpipe.microbatch import Flat
from torchgpipe.relay import Stopped

if TYPE_CHECKING:
    from torchgpipe.distributed.cuda import Transfer

NEVER = timedelta(days=365)
"""The timeout of an operation between ranks. A rank may wait as long as another one computes."""

SLOT = 2**16
_HEAD = struct.Struct("<qqq")


class Message(NamedTuple):
    """Tensors, some of them `None`, and what is said of them. `serial` tells mini-batches apart."""

    serial: int
    about: Any
    tensors: Flat


class _Layout(NamedTuple):
    """A tensor's type, shape, strides, and bytes that go over gloo: none if it is on `meta`, and so comes by NCCL."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bytes: int
    meta: bool


_Description = tuple[Hashable, tuple[_Layout | None, ...]]


class Departure(NamedTuple):
    """What goes over gloo for a message's tensors, and what to wait for before that is sent, and after."""

    tensors: Flat
    before: torch.cuda.Event | None = None
    after: torch.cuda.Event | None = None


class _End:
    """One end of a wire, and which description the next message has, if all is as in the mini-batch before.

    Both ends see the same messages and beginnings of mini-batches in the same order, so they expect the same.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int, broken: Callable[[BaseException], None]) -> None:
        self._group, self._rank, self._tag, self._broken = group, rank, tag, broken
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
        return [size for size, place in _places(layouts, _HEAD.size) if place is None]

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
    """Send messages to `rank` of the group, in order.

    Attributes:
        sent: bytes of tensors that were sent; headers and descriptions are not counted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        tag: int,
        broken: Callable[[BaseException], None],
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__(group, rank, tag, broken)
        self._transfer = transfer
        self._held: deque[tuple[Message, list[int | None]]] = deque()
        self._posted: SimpleQueue[_Posted | None] = SimpleQueue()
        self._under_way = 0  # messages that have departed, and of which `settle` does not know that they were received
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()  # for each of them, whether all was right
        self._numbers: dict[_Description, int] = {}
        self.sent = 0
        self.thread = threading.Thread(target=self._wait, name=f"gpipe-to-{rank}", daemon=True)
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
                raise error
            self._under_way -= 1

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
        self.sent += sum(_once(x.detach()).nbytes for x in tensors if x is not None and x.layout is torch.strided)
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
        flat = [None if x is None else _disjoint(x) for x in message.tensors]
        layouts = tuple([None if x is None else _layout(x) for x in flat])
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
        rows = [row(dense(_once(x))) for x in sent]
        for x, (_, place) in zip(rows, _places(layouts, at), strict=True):
            (large if place is None else slot).append(x)
        return [torch.cat(slot), *fillers, *large]


class Receiver(_End):
    """Receive messages from `rank` of the group, in order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        tag: int,
        broken: Callable[[BaseException], None],
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__(group, rank, tag, broken)
        self._transfer = transfer
        self._memory = _Memory(pinned=transfer is not None and transfer.pins)
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
                self._gloo(self._receive(torch.frombuffer(new, dtype=torch.uint8)).wait)
            self._known.append(pickle.loads(new))
        about, layouts = self._known[number]
        places = [*_places(layouts, at)]
        if not as_expected:
            large = self._received([size for size, place in places if place is None])
        apart = iter(large)
        rows = [next(apart)[0] if at is None else self._slot[at : at + size].clone() for size, at in places]
        self._seen(number)
        self._next = self._receive(self._slot)
        self._prepare()
        self._wait(large)
        remaining = iter(rows)
        tensors = tuple([None if layout is None else _tensor(layout, remaining) for layout in layouts])
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
            return _Never(error)

    def _wait(self, received: Sequence[tuple[Tensor, Any]]) -> None:
        for _, work in received:
            self._gloo(work.wait)


class _Never(NamedTuple):
    """What stands for an operation that could not begin."""

    error: RuntimeError

    def wait(self) -> None:
        raise self.error


class _Memory:
    """Memory for large tensors that arrive, which is used again when no tensor is in it any more.

    New memory would come from the system page by page, which takes longer than to receive what goes into it.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[mmap.mmap] = []

    def row(self, size: int) -> Tensor:
        """Return memory of `size` bytes."""
        if self._pinned:  # of which PyTorch keeps what is free
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        memory = next((x for x in self._free if len(x) == size), None)
        if memory is None:
            self._free.clear()  # shapes have changed
            memory = _fresh(size)
        else:
            self._free.remove(memory)
        view = memoryview(memory)  # PyTorch holds it as long as there are tensors in it
        weakref.finalize(view, self._free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # or a fork would see what comes later
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _places(layouts: Iterable[_Layout | None], at: int) -> Iterator[tuple[int, int | None]]:
    """Yield each tensor's size and its place in the slot, of which `at` bytes are taken; `None` where it is too large.

    Tensors without contents are left out.
    """
    for layout in layouts:
        if layout is not None and layout.bytes:
            fits = at + layout.bytes <= SLOT
            yield layout.bytes, at if fits else None
            at += layout.bytes * fits


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.dtype, tuple(x.shape), x.stride(), 0 if x.is_meta else _once(x).nbytes, x.is_meta)


def _tensor(layout: _Layout, rows: Iterator[Tensor]) -> Tensor:
    if not layout.bytes:
        device = "meta" if layout.meta else "cpu"
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
    content = next(rows)
    reach = 1 + sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    if reach * layout.dtype.itemsize == layout.bytes:
        x = torch.empty(0, dtype=layout.dtype, device="cpu")
        return x.set_(content.untyped_storage(), 0, layout.shape, layout.stride)
    # With gaps as at the sender: PyTorch adds up in another order where there are none.
    x = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
    once = _once(x)
    once.copy_(content.view(layout.dtype).view(once.shape))
    return x


def _once(x: Tensor) -> Tensor:
    """Return the tensor without the repetitions of `expand`."""
    for d, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if n > 1 and step == 0:
            x = x.narrow(d, 0, 1)
    return x


def _disjoint(x: Tensor) -> Tensor:
    """Return the tensor as it is in memory, or a copy if some memory is of several elements, but for `expand`."""
    x = _plain(x)
    reach = 1
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and step:
            if step < reach:
                return x.contiguous()
            reach += (n - 1) * step
    return x


def _plain(x: Tensor) -> Tensor:
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided or x.is_quantized:
        kind = type(x).__name__ if x.layout is torch.strided else f"tensor of {x.layout}"
        raise TypeError(f"only dense tensors travel between ranks, but a partition returned a {kind}")
    return x.detach().resolve_conj().resolve_neg()


def dense(x: Tensor) -> Tensor:
    """Return the tensor without gaps in its memory; itself, detached, where it has none."""
    x = _plain(x)
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return x.contiguous()


def row(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in a row, as they are in memory."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
