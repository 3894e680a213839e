"""All wires of one rank, and a program's links over them.

Every rank has a wire to every other for control: what rank 0 says when a mini-batch begins, and what the last rank says
when its forward has ended. Programs' items have wires of their own, and so have skips, which go straight from the rank
that stashes to the rank that pops.

A rank that fails tells all others its error, and one that has ended tells them that. For both, each rank has a thread
for every other that only listens. When it hears of a failure, it closes this rank's connections, which ends all that
waits for any rank.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.distributed.cuda import Transfer, connect
from torchgpipe.distributed.wire import NEVER, Message, Receiver, Sender
from torchgpipe.item import Item
from torchgpipe.microbatch import Flat
from torchgpipe.program import Links
from torchgpipe.relay import Stopped
from torchgpipe.seeds import Seeds
from torchgpipe.skip.layout import Crossing
from torchgpipe.task_graph import leaves

GRACE = timedelta(seconds=2)
"""How long to wait for word of who has failed before a broken connection is all that is known."""

KINDS = ("control", "forward", "backward", "forward skips", "backward skips", "word", "word heard", "end")
"""What goes from rank to rank. Their numbers are gloo's tags."""

_NOTHING = torch.empty(0, device="cpu")

_PARTED = None
"""The word of a rank that has ended; that of one that has failed says why."""

E = TypeVar("E", Sender, Receiver)


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
        self._others = [peer for peer in range(self.n) if peer != own]
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._met = False
        # Not by `new_group`: where groups have come and gone, ranks may give one group different names.
        which = (*ranks,)
        self._store = PrefixStore(f"torchgpipe/{which}/{_made[which]}", _get_default_store())
        self._group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(self._store, own, self.n, NEVER))
        _made[which] += 1
        self._senders: dict[tuple[str, int], Sender] = {}
        self._receivers: dict[tuple[str, int], Receiver] = {}
        # Texts, since an error would keep the frames that it has come through alive.
        self._error: str | None = None
        self._lost: str | None = None
        self._gone: set[int] = set()  # ranks that have parted
        self._known = threading.Event()  # there is nothing more to learn of a failure
        self.closed = self.parted = False
        self._closing = threading.RLock()
        _open.add(self)
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), name=f"gpipe-listens-to-{peer}", daemon=True)
            for peer in self._others
        ]
        for thread in self._threads:
            thread.start()

    def meet(self, serial: int, device: torch.device, crossings: Sequence[Crossing]) -> None:
        """Let ranks agree, in their first mini-batch, how tensors travel."""
        if not self._met:
            self._met = True
            connect(self._transfers, device, self.own, crossings, self._store, partial(self.exchange, serial))

    def sender(self, kind: str, peer: int) -> Sender:
        """Return the wire to a rank, made when first asked for."""
        if (kind, peer) not in self._senders:
            self._senders[kind, peer] = self._wire(Sender, kind, peer)
        return self._senders[kind, peer]

    def receiver(self, kind: str, peer: int) -> Receiver:
        """Return the wire from a rank, made when first asked for."""
        if (kind, peer) not in self._receivers:
            self._receivers[kind, peer] = self._wire(Receiver, kind, peer)
        return self._receivers[kind, peer]

    def _wire(self, end: type[E], kind: str, peer: int) -> E:
        broken = partial(self._broken, peer)
        return end(self._group, peer, KINDS.index(kind), broken, self._transfers.get((kind, peer)))

    def tell(self, what: str, serial: int, tensors: Flat, about: Hashable = None) -> None:
        """Tell all other ranks something; each of them has to hear it."""
        for peer in self._others:
            sender = self.sender("control", peer)
            sender.begin()
            sender.give(Message(serial, (what, about), tensors))

    def hear(self, what: str, serial: int, peer: int) -> tuple[Sequence[Any], Any]:
        """Wait for what a rank tells all others; return the tensors, and what is said of them."""
        receiver = self.receiver("control", peer)
        receiver.begin()
        message = receiver.take()
        check_serial(message, serial)
        told, about = message.about
        if told != what:
            raise RuntimeError(f"every rank has to call the same, but rank {peer} is at its {told}, not its {what}")
        return message.tensors, about

    def exchange(self, serial: int, own: Tensor) -> list[Tensor]:
        """Return what every rank gives, in their order."""
        self.tell("exchange", serial, (own.cpu(),))
        heard: Any = {peer: self.hear("exchange", serial, peer)[0][0] for peer in self._others}
        return [own if rank == self.own else heard[rank] for rank in range(self.n)]

    @property
    def stopped(self) -> bool:
        """Whether some rank has failed."""
        return self._error is not None or self._lost is not None

    @property
    def sent(self) -> dict[tuple[str, int], int]:
        """Bytes of tensors that were sent, by kind and rank."""
        return {key: sender.sent for key, sender in self._senders.items()}

    @property
    def described(self) -> int:
        """How many descriptions of messages were sent."""
        return sum(sender.described for sender in self._senders.values())

    def failure(self) -> BaseException:
        """Return why programs were stopped."""
        self._known.wait(GRACE.total_seconds())
        return RankFailed(self._error or self._lost or f"rank {self.own} has failed, and closed its connections")

    def fail(self, error: BaseException, doing: str) -> None:
        """Tell all other ranks that this one has failed."""
        self._known.set()
        line, *_ = str(error).splitlines() or [""]
        said = f"rank {self.own} failed in {doing}: {type(error).__name__}: {line}"
        self._say(said)

    def _say(self, word: str | None) -> None:
        """Give all other ranks a last word, and wait until they have it: closing a connection may lose what is sent."""
        heard = []
        for peer in self._others:
            with suppress(RuntimeError, Stopped):
                self.sender("word", peer).give(Message(0, word, ()))
                heard.append(self._group.recv([_NOTHING], peer, KINDS.index("word heard")))
        for work in heard:
            with suppress(RuntimeError):
                work.wait(GRACE)

    def release(self) -> None:
        """Let everything leave that was given, since the program has no more tasks."""
        for sender in self._senders.values():
            sender.release()

    def flush(self) -> None:
        """Wait until everything was received that has left."""
        for sender in self._senders.values():
            sender.settle()

    def part(self) -> None:
        """Close the connections when other ranks have what was sent to them; they may go on among themselves."""
        with self._closing:
            if not self.closed and not self.stopped:
                for transfer in self._transfers.values():
                    transfer.finish()
                patience = threading.Timer(GRACE.total_seconds(), self._stop)
                patience.daemon = True
                patience.start()
                with suppress(RuntimeError, Stopped):
                    self.flush()
                patience.cancel()
                self._say(_PARTED)
                self.parted = True
            self.close()

    def close(self) -> None:
        """Close all connections, and end all threads; other ranks that wait for this one are told by that."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            self._known.set()
            self._stop()
            # A thread that is still in gloo when Python ends aborts the process.
            for thread in (*self._threads, *(sender.thread for sender in self._senders.values())):
                thread.join(GRACE.total_seconds())

    def _listen(self, peer: int) -> None:
        """Wait for word that a rank has failed; then end all waits of this one."""
        try:
            word = self._wire(Receiver, "word", peer).take().about
        except Stopped:
            self._known.wait(GRACE.total_seconds())  # another rank may say why
        else:
            if word is _PARTED:
                self._gone.add(peer)
            else:
                self._error = self._error or word
            with suppress(RuntimeError):
                self._group.send([_NOTHING], peer, KINDS.index("word heard")).wait(GRACE)
            if word is _PARTED:
                return
        if not self._known.is_set():
            self._known.set()
            self._stop()

    def _broken(self, peer: int, error: BaseException) -> None:
        why = "which has closed it" if peer in self._gone else "which gave no reason: has its process ended?"
        line, *_ = str(error).splitlines() or [""]
        self._lost = self._lost or f"rank {self.own} has lost its connection to rank {peer}, {why} ({line})"

    def _stop(self) -> None:
        """End all waits for other ranks, in all threads."""
        # Nothing but a wait that times out makes gloo close the connections of a group; on a broken one it fails at
        # once. The group's own methods work after `destroy_process_group()`, too.
        for peer in self._others:
            with suppress(RuntimeError):
                self._group.recv([_NOTHING], peer, KINDS.index("end")).wait(timedelta(milliseconds=1))
        for sender in [*self._senders.values()]:
            sender.stop()
        for transfer in [*self._transfers.values()]:
            transfer.abort()


class Messages(Links):
    """A program's links over wires, in one mini-batch's forward or backward; see `torchgpipe.program.Links`."""

    kind: str
    step: int

    def __init__(self, wires: Wires, serial: int, crossings: Sequence[Crossing]) -> None:
        before, after = wires.own - self.step, wires.own + self.step
        self._wires, self._serial = wires, serial
        self._before = wires.receiver(self.kind, before) if 0 <= before < wires.n else None
        self._after = wires.sender(self.kind, after) if 0 <= after < wires.n else None
        self._between: dict[int, list[Crossing]] = defaultdict(list)  # this rank and another
        for crossing in crossings:
            if wires.own in (crossing.source, crossing.target):
                self._between[self._other(crossing)].append(crossing)
        skips: list[Sender | Receiver] = [
            (wires.sender if (other - wires.own) * self.step > 0 else wires.receiver)(f"{self.kind} skips", other)
            for other in self._between
        ]
        for end in (self._before, self._after, *skips):
            if end is not None:
                end.begin()
        self._left: dict[int, dict[Crossing, tuple[Hashable, Tensor | None]]] = defaultdict(dict)
        self._arrived: dict[Crossing, tuple[Any, Tensor | None]] = {}

    def check(self) -> None:
        if self._wires.stopped:
            raise Stopped

    def admit(self) -> None:
        assert self._after is not None
        self._after.settle()

    def announce(self) -> None:
        assert self._after is not None
        self._after.give(Message(self._serial, "soon", ()))

    def expect(self) -> None:
        self._read(self._before)

    def _give(self, about: Hashable, tensors: Flat) -> None:
        assert self._after is not None
        self._after.give(Message(self._serial, about, tensors))

    def _take(self) -> tuple[Any, Flat]:
        return self._read(self._before)

    def _leave(self, crossing: Crossing, about: Hashable, tensor: Tensor | None) -> None:
        # All skips of a micro-batch for one rank are one message. They are fetched in another order than they are left.
        other = self._other(crossing)
        left, between = self._left[other], self._between[other]
        left[crossing] = about, tensor
        if len(left) == len(between):
            abouts, skips = zip(*(left[each] for each in between), strict=True)
            sender = self._wires.sender(f"{self.kind} skips", other)
            sender.settle(abs(other - self._wires.own))
            sender.give(Message(self._serial, abouts, skips))
            left.clear()

    def _fetch(self, crossing: Crossing) -> tuple[Any, Tensor | None]:
        if crossing not in self._arrived:
            other = self._other(crossing)
            abouts, skips = self._read(self._wires.receiver(f"{self.kind} skips", other))
            self._arrived.update(zip(self._between[other], zip(abouts, skips, strict=True), strict=True))
        return self._arrived.pop(crossing)

    def _other(self, crossing: Crossing) -> int:
        return crossing.target if crossing.source == self._wires.own else crossing.source

    def _read(self, receiver: Receiver | None) -> tuple[Any, Flat]:
        assert receiver is not None
        message = receiver.take()
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
