"""A wire: messages of tensors from one process to another over gloo, each way with a thread of its own.

A message is a description and tensors. The description says everything but the tensors' contents: shapes, types,
and whatever the sender adds. Each wire numbers its descriptions and sends each one once, so that a message is

    a slot of at most 4 KiB:    serial | number of the description | its length, if it is new | it | small tensors
    large tensors, one by one   where they do not fit into the slot

The receiver always waits for a slot, and with it learns what else will come. Gloo leaves no other way: a buffer that is
too small ends the process, and one that is too large is filled in part without a word.

Gloo's `isend` and `irecv` come to an end only when somebody waits for them, and a wait that times out closes all
connections of its process group. So each wire has a thread that does nothing but wait for gloo, once for each message.
Programs touch queues only.
"""

from __future__ import annotations

import math
import pickle
import struct
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
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

SLOT = 4096
_HEAD = struct.Struct("<qqq")
_STOP = object()


class Message(NamedTuple):
    """Tensors, some of them `None`, and what is said of them. `serial` tells mini-batches apart."""

    serial: int
    about: Any
    tensors: Flat


class _Layout(NamedTuple):
    """A tensor's type, shape and strides; its contents come by NCCL if it is on `meta`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    meta: bool

    @property
    def bytes(self) -> int:  # that go over gloo
        return 0 if self.meta else math.prod(self.shape) * self.dtype.itemsize


class Departure(NamedTuple):
    """What goes over gloo for a message's tensors, and what the thread waits for before and after it sends that."""

    tensors: Flat
    before: torch.cuda.Event | None = None
    after: torch.cuda.Event | None = None


class Sender:
    """Send messages to `rank` of the group, in order, by a thread of its own.

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
        self._group, self._rank, self._tag, self._broken = group, rank, tag, broken
        self._transfer = transfer
        self._held: deque[tuple[Message, list[int | None], bool]] = deque()
        self._queue = Queue()
        self._tickets = Queue()
        self._tickets.put(None)
        self._known: dict[Hashable, int] = {}
        self.sent = 0
        self._given = self._done = 0  # messages; each number is changed by one thread only
        self.thread = _started(self._run, f"gpipe-to-{rank}")

    @property
    def busy(self) -> bool:
        """Whether a message that was given is not sent yet, and still can be."""
        return self._given > self._done and self.thread.is_alive()

    def admit(self) -> None:
        """Wait until the message that was admitted before has been sent."""
        self._tickets.get()

    def give(self, message: Message, *, admitted: bool = False) -> None:
        """Send a message. Of those that were `admitted`, at most one waits; of others, any number."""
        self._given += 1
        # The versions of now: the thread sends later, and a layer must not change the tensors in between.
        self._held.append((message, versions(message.tensors), admitted))
        if self._transfer is None or len(self._held) > self._transfer.late:
            self._depart()

    def release(self) -> None:
        """Let the messages leave that would leave later: the program has no more tasks."""
        while self._held:
            self._depart()

    def stop(self) -> None:
        """End the thread, and every wait for it."""
        self._queue.stop()
        self._tickets.stop()

    def _depart(self) -> None:
        message, before, admitted = self._held.popleft()
        tensors = message.tensors
        departure = Departure(tensors) if self._transfer is None else self._transfer.depart(tensors)
        self._queue.put((message, before, admitted, departure))

    def _run(self) -> None:
        try:
            if self._transfer is not None:
                self._transfer.begin()
            while True:
                if self._send(*self._queue.get()):
                    self._tickets.put(None)
                self._done += 1
        except Stopped:
            pass
        except BaseException as error:
            self._broken(error)

    def _send(self, message: Message, before: list[int | None], admitted: bool, departure: Departure) -> bool:
        if departure.before is not None:
            departure.before.synchronize()
        parts = self._parts(message._replace(tensors=departure.tensors))
        for work in [self._group.send([part], self._rank, self._tag) for part in parts]:
            _wait(work)
        if departure.after is not None:
            departure.after.synchronize()
        self.sent += sum(x.nbytes for x in message.tensors if x is not None)
        if versions(message.tensors) != before:
            raise RuntimeError(
                f"an input of partition {self._rank} was changed in place before it was sent: a layer returns memory "
                "that it uses again (a buffer) for the next micro-batch; return a copy (x.clone())"
            )
        return admitted

    def _parts(self, message: Message) -> list[Tensor]:
        """Return what to send, as bytes: the slot, then what does not fit into it."""
        flat = [None if x is None else _flat(x) for x in message.tensors]
        description = (message.about, tuple(None if x is None else x[0] for x in flat))
        new = b""
        number = self._known.get(description)
        if number is None:
            number = self._known[description] = len(self._known)
            new = pickle.dumps(description)
        head = _HEAD.pack(message.serial, number, len(new))
        bodies = [x[1] for x in flat if x is not None and x[0].bytes]
        size = sum(x[0].bytes for x in flat if x is not None)
        if len(head) + len(new) + size <= SLOT:
            return [torch.cat([_bytes(head + new), *bodies])]
        if len(head) + len(new) <= SLOT:
            return [_bytes(head + new), *bodies]
        return [_bytes(head), _bytes(new), *bodies]


class Receiver:
    """Receive messages from `rank` of the group, in order, by a thread of its own, which hands each to `deliver`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        tag: int,
        deliver: Callable[[Message], None],
        broken: Callable[[BaseException], None],
        *,
        pin: bool = False,
    ) -> None:
        self._group, self._rank, self._tag = group, rank, tag
        self._deliver, self._broken = deliver, broken
        self._pin = pin
        self._known: list[tuple[Hashable, Sequence[_Layout | None]]] = []
        self.thread = _started(self._run, f"gpipe-from-{rank}")

    def _run(self) -> None:
        try:
            while True:
                self._deliver(self._message())
        except Stopped:
            pass
        except BaseException as error:
            self._broken(error)

    def _message(self) -> Message:
        slot = self._receive(torch.empty(SLOT, dtype=torch.uint8, device="cpu"))
        serial, number, length = _HEAD.unpack(slot[: _HEAD.size].numpy().tobytes())
        at = _HEAD.size
        if length:
            if at + length <= SLOT:
                new, at = slot[at : at + length], at + length
            else:
                new = self._receive(torch.empty(length, dtype=torch.uint8, device="cpu"))
                at = SLOT + 1  # nothing more is in the slot
            self._known.append(pickle.loads(new.numpy().tobytes()))
        about, layouts = self._known[number]
        fits = at + sum(x.bytes for x in layouts if x is not None) <= SLOT
        tensors: list[Tensor | None] = []
        for layout in layouts:
            if layout is None:
                tensors.append(None)
                continue
            on, pin = ("meta", False) if layout.meta else ("cpu", self._pin)
            x = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=on, pin_memory=pin)
            tensors.append(x)
            if layout.bytes and fits:
                row(x).copy_(slot[at : at + layout.bytes])
                at += layout.bytes
            elif layout.bytes:
                self._receive(row(x))
        return Message(serial, about, tuple(tensors))

    def _receive(self, buffer: Tensor) -> Tensor:
        _wait(self._group.recv([buffer], self._rank, self._tag))
        return buffer


class Inbox:
    """Messages that have arrived and wait to be taken; with `lead`, no more than one of them."""

    def __init__(self, *, lead: bool, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._queue = Queue()
        self._taken = Queue()
        self._lead = lead

    def put(self, message: Message) -> None:
        """Add a message; with `lead`, wait until it is taken."""
        self._queue.put(message)
        if self._lead:
            self._taken.get()

    def take(self) -> Message:
        """Wait for the next message."""
        message: Message = self._queue.get()
        if self._lead:
            self._taken.put(None)
        if self._transfer is not None:
            return message._replace(tensors=self._transfer.arrive(message.tensors))
        return message

    def stop(self) -> None:
        """End every wait."""
        self._queue.stop()
        self._taken.stop()


class Queue(SimpleQueue[Any]):
    """A queue whose waits end by `Stopped` once it has been stopped."""

    def get(self, *_: Any) -> Any:
        """Wait for the next item."""
        item = super().get()
        if item is _STOP:
            self.put(_STOP)  # for whoever waits, too
            raise Stopped
        return item

    def stop(self) -> None:
        """End every wait, now and later."""
        self.put(_STOP)


def dense(x: Tensor) -> Tensor:
    """Return the tensor without gaps in its memory; itself, detached, where it has none."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided or x.is_quantized:
        raise TypeError(
            f"only dense tensors travel between ranks, but a partition returned a {type(x).__name__} of {x.layout}"
        )
    x = x.detach().resolve_conj().resolve_neg()
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


def row(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in a row, as they are in memory."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _flat(x: Tensor) -> tuple[_Layout, Tensor]:
    x = dense(x)
    return _Layout(x.dtype, tuple(x.shape), x.stride(), x.is_meta), row(x)


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _started(run: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
