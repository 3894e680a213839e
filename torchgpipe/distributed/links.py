"""All wires of one rank, and a program's links over them.

Every rank has a wire to every other for control: what rank 0 says when a mini-batch begins, what the last rank says
when its forward has ended, and who has failed. Programs' items have wires of their own, and so have skips, which go
straight from the rank that stashes to the rank that pops.

A rank that fails tells all others its error, and then closes its connections; everything that waits on any rank ends.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.distributed.cuda import Transfer, connect
from torchgpipe.distributed.wire import NEVER, Inbox, Message, Receiver, Sender
from torchgpipe.item import Item
from torchgpipe.microbatch import Flat
from torchgpipe.program import Links
from torchgpipe.relay import Stopped
from torchgpipe.seeds import Seeds
from torchgpipe.skip.layout import Crossing
from torchgpipe.task_graph import leaves

GRACE = 2.0
"""Seconds: how long to wait for word of who has failed before a broken connection is all that is known."""

POLL = 0.0005
"""Seconds between two looks at whether everything was sent."""

KINDS = ("control", "forward", "backward", "forward skips", "backward skips")
"""What wires carry. Their numbers are gloo's tags."""


HEARD = ("head", "tail", "exchange", "bye")
"""What ranks tell all others: the first when a mini-batch begins, the last when its forward has ended, and each."""


class RankFailed(RuntimeError):
    """Another rank has failed; the message names it, and has its error."""


_open: weakref.WeakSet[Wires] = weakref.WeakSet()

_made: Counter[tuple[int, ...]] = Counter()
"""How often this process has met other ranks; they count alike, since each time all of them have to come."""


@atexit.register
def _part_all() -> None:
    for wires in [*_open]:
        wires.part()


class Wires:
    """The wires of rank `own` of a group to all others, and the first failure of any of them."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self.own, self.n = own, len(ranks)
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._met = False
        # Not by `new_group`: where groups have come and gone, ranks may give one group different names.
        which = (*ranks,)
        self._store = PrefixStore(f"torchgpipe/{which}/{_made[which]}", _get_default_store())
        self._group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(self._store, own, self.n, NEVER))
        _made[which] += 1
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, int], Sender] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._control: dict[Hashable, Inbox] = {what: Inbox(lead=False) for what in HEARD}
        self.error: BaseException | None = None
        self._lost: BaseException | None = None
        self._known = threading.Event()
        self.closed = self.parted = False
        self._closing = threading.RLock()
        self._threads: list[threading.Thread] = []
        _open.add(self)
        for peer in self._others():
            receiver = Receiver(self._group, peer, KINDS.index("control"), self._hear, self._broken)
            self._threads.append(receiver.thread)
            self.sender("control", peer)

    def meet(self, serial: int, device: torch.device, crossings: Sequence[Crossing]) -> None:
        """Let ranks agree, in their first mini-batch, how tensors travel."""
        if not self._met:
            self._met = True
            connect(self._transfers, device, self.own, crossings, self._store, partial(self.exchange, serial))

    def sender(self, kind: str, peer: int) -> Sender:
        """Return the wire to a rank, made when first asked for."""
        with self._lock:
            if (kind, peer) not in self._senders:
                transfer = self._transfers.get((kind, peer))
                sender = Sender(self._group, peer, KINDS.index(kind), self._broken, transfer)
                self._senders[kind, peer] = sender
                self._threads.append(sender.thread)
            return self._senders[kind, peer]

    def inbox(self, kind: str, peer: int) -> Inbox:
        """Return what arrives by the wire from a rank, which is made when first asked for."""
        with self._lock:
            if (kind, peer) not in self._inboxes:
                transfer = self._transfers.get((kind, peer))
                self._inboxes[kind, peer] = inbox = Inbox(lead=not kind.endswith("skips"), transfer=transfer)
                pin = transfer is not None and transfer.pins
                receiver = Receiver(self._group, peer, KINDS.index(kind), inbox.put, self._broken, pin=pin)
                self._threads.append(receiver.thread)
            return self._inboxes[kind, peer]

    def tell(self, what: str, serial: int, tensors: Flat, about: Hashable = None) -> None:
        """Tell all other ranks something."""
        for peer in self._others():
            self.sender("control", peer).give(Message(serial, (what, about), tensors))

    def heard(self, what: str) -> Message:
        """Wait for what one rank tells all others, the head or the tail of a mini-batch."""
        return self._control[what].take()

    def exchange(self, serial: int, own: Tensor) -> list[Tensor]:
        """Return what every rank gives, in their order."""
        self.tell("exchange", serial, (own.cpu(),), self.own)
        found: dict[int, Any] = {self.own: own}
        while len(found) < self.n:
            message = self.heard("exchange")
            check_serial(message, serial)
            found[message.about[1]] = message.tensors[0]
        return [found[rank] for rank in range(self.n)]

    @property
    def stopped(self) -> bool:
        """Whether some rank has failed."""
        return self._known.is_set() or self._lost is not None

    @property
    def sent(self) -> dict[tuple[str, int], int]:
        """Bytes of tensors that were sent, by kind and rank."""
        return {key: sender.sent for key, sender in self._senders.items()}

    def failure(self) -> BaseException:
        """Return why programs were stopped."""
        if self.error is None:
            self._known.wait(GRACE)
        return self.error or RankFailed(
            f"rank {self.own} has lost a connection to another rank, which gave no reason (was its process killed?): "
            f"{self._lost}"
        )

    def fail(self, error: BaseException, doing: str) -> None:
        """Tell all other ranks that this one has failed."""
        self.tell("failed", 0, (), f"rank {self.own} failed in {doing}: {type(error).__name__}: {error}")
        end = time.monotonic() + GRACE
        # Also if a connection has broken: another rank may have heard of it, and have left, before all others have.
        while time.monotonic() < end and self._busy("control"):
            time.sleep(POLL)

    def release(self) -> None:
        """Let everything leave that was given, since the program has no more tasks."""
        for sender in [*self._senders.values()]:
            sender.release()

    def flush(self) -> None:
        """Wait until everything was sent, or some rank has failed."""
        while not self.stopped and self._busy(*KINDS):
            time.sleep(POLL)

    def _busy(self, *kinds: str) -> bool:
        return any(sender.busy for (kind, _), sender in self._senders.items() if kind in kinds)

    def part(self) -> None:
        """Close the connections once the other ranks do so, too, or after a while."""
        with self._closing:
            if not self.closed and not self.stopped:
                # Whoever closes a connection may lose what the other end has not read yet.
                self.tell("bye", 0, ())
                patience = threading.Timer(GRACE, self._stop)
                patience.daemon = True
                patience.start()
                with suppress(Stopped):
                    for _ in self._others():
                        self.heard("bye")
                patience.cancel()
                self.parted = True
            self.close()

    def close(self) -> None:
        """Close all connections, and end all threads; other ranks that wait for this one are told by that."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            for transfer in self._transfers.values() if not self.stopped else ():
                transfer.finish()
            self._stop()
            for sender in self._senders.values():
                sender.stop()
            if self.n > 1:
                # Nothing but a wait that times out makes gloo close the connections of a group.
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1, device="cpu")], self._others()[0], len(KINDS)).wait(
                        timedelta(milliseconds=1)
                    )
            # A thread that is still in gloo when Python ends aborts the process.
            for thread in self._threads:
                thread.join(GRACE)

    def _others(self) -> list[int]:
        return [peer for peer in range(self.n) if peer != self.own]

    def _hear(self, message: Message) -> None:
        what, about = message.about
        if what == "failed":
            self.error = self.error or RankFailed(about)
            self._known.set()
            self._stop()
            raise Stopped
        self._control[what].put(message)

    def _broken(self, error: BaseException) -> None:
        """Note that a thread has failed: a connection has broken, or it was given what it cannot send."""
        if isinstance(error, ConnectionError):
            self._lost = self._lost or error
        else:
            self.error = self.error or error
            self._known.set()
        self._stop()

    def _stop(self) -> None:
        """End all that programs wait for; this rank may still say what has happened."""
        with self._lock:
            senders = [sender for (kind, _), sender in self._senders.items() if kind != "control"]
            ends: list[Sender | Inbox] = [*senders, *self._inboxes.values(), *self._control.values()]
        for end in ends:
            end.stop()
        for transfer in [*self._transfers.values()]:
            transfer.abort()


class Messages(Links):
    """A program's links over wires, in one mini-batch's forward or backward; see `torchgpipe.program.Links`."""

    kind: str
    step: int

    def __init__(self, wires: Wires, serial: int, crossings: Sequence[Crossing]) -> None:
        before, after = wires.own - self.step, wires.own + self.step
        self._wires, self._serial = wires, serial
        self._before = wires.inbox(self.kind, before) if 0 <= before < wires.n else None
        self._after = wires.sender(self.kind, after) if 0 <= after < wires.n else None
        self._between: dict[int, list[Crossing]] = defaultdict(list)  # this rank and another
        for crossing in crossings:
            if wires.own in (crossing.source, crossing.target):
                self._between[self._other(crossing)].append(crossing)
        self._left: dict[int, dict[Crossing, tuple[Hashable, Tensor | None]]] = defaultdict(dict)
        self._arrived: dict[Crossing, tuple[Any, Tensor | None]] = {}

    def check(self) -> None:
        if self._wires.stopped:
            raise Stopped

    def admit(self) -> None:
        assert self._after is not None
        self._after.admit()

    def announce(self) -> None:
        assert self._after is not None
        self._after.give(Message(self._serial, "soon", ()))

    def expect(self) -> None:
        self._read(self._before)

    def _give(self, about: Hashable, tensors: Flat) -> None:
        assert self._after is not None
        self._after.give(Message(self._serial, about, tensors), admitted=True)

    def _take(self) -> tuple[Any, Flat]:
        return self._read(self._before)

    def _leave(self, crossing: Crossing, about: Hashable, tensor: Tensor | None) -> None:
        # All skips of a micro-batch for one rank are one message. They are fetched in another order than they are left.
        other = self._other(crossing)
        left, between = self._left[other], self._between[other]
        left[crossing] = about, tensor
        if len(left) == len(between):
            abouts, skips = zip(*(left[each] for each in between), strict=True)
            self._wires.sender(f"{self.kind} skips", other).give(Message(self._serial, abouts, skips))
            left.clear()

    def _fetch(self, crossing: Crossing) -> tuple[Any, Tensor | None]:
        if crossing not in self._arrived:
            other = self._other(crossing)
            abouts, skips = self._read(self._wires.inbox(f"{self.kind} skips", other))
            self._arrived.update(zip(self._between[other], zip(abouts, skips, strict=True), strict=True))
        return self._arrived.pop(crossing)

    def _other(self, crossing: Crossing) -> int:
        return crossing.target if crossing.source == self._wires.own else crossing.source

    def _read(self, inbox: Inbox | None) -> tuple[Any, Flat]:
        assert inbox is not None
        message = inbox.take()
        check_serial(message, self._serial)
        return message.about, message.tensors


class Forward(Messages):
    """The links of a forward, whose items are micro-batches.

    With a micro-batch goes whether any partition so far has drawn random numbers. With `in_order`, tasks run one after
    another, and the state of the default generator goes with it, too.
    """

    kind, step = "forward", 1

    def __init__(
        self, wires: Wires, serial: int, crossings: Sequence[Crossing], seeds: Seeds, *, in_order: bool
    ) -> None:
        super().__init__(wires, serial, crossings)
        self._seeds, self._in_order = seeds, in_order

    def give(self, item: Item) -> None:
        state = (torch.get_rng_state(),) if self._in_order else ()
        self._give((*_about(item), self._seeds.drew), (*item.flat, *state))

    def take(self) -> Item:
        (*about, drew), tensors = self._take()
        self._seeds.drew = self._seeds.drew or drew
        if self._in_order:
            state, tensors = tensors[-1], tensors[:-1]
            assert state is not None
            torch.set_rng_state(state.cpu())
        return _item(about, tensors)

    def leave(self, i: int, crossing: Crossing, skip: Item) -> None:
        self._leave(crossing, _about(skip), *skip.flat)

    def fetch(self, i: int, crossing: Crossing) -> Item:
        about, skip = self._fetch(crossing)
        return _item(about, (skip,))


class Backward(Messages):
    """The links of a backward, whose items are gradients."""

    kind, step = "backward", -1

    def give(self, grads: Flat) -> None:
        self._give("gradients", grads)

    def take(self) -> Flat:
        return self._take()[1]

    def leave(self, i: int, crossing: Crossing, grad: Tensor | None) -> None:
        self._leave(crossing, "gradient", grad)

    def fetch(self, i: int, crossing: Crossing) -> Tensor | None:
        return self._fetch(crossing)[1]


def check_serial(message: Message, serial: int) -> None:
    """Raise `RuntimeError` if a message is of another mini-batch than this rank is in."""
    if message.serial != serial:
        raise RuntimeError(
            f"ranks are in different mini-batches, {message.serial} and {serial}: every rank has to call the pipeline, "
            "and then backward(), equally often and in one order; after a failure, call close() on all of them first"
        )


def _about(item: Item) -> tuple[Hashable, ...]:
    return item.atomic, item.shared, tuple([x is not None and x.requires_grad for x in item.flat])


def _item(about: Sequence[Any], tensors: Sequence[Tensor | None]) -> Item:
    atomic, shared, needs = about
    return Item(leaves(tuple(tensors), needs), atomic, shared)
