"""All wires of one rank.

Every rank has a control wire to every other. On it rank 0 tells when a mini-batch begins, and the last rank tells
when its forward has ended. Programs' items have wires of their own (links.py), and so have skips, which go straight
from the rank that stashes to the rank that pops.

What ranks say about themselves has wires, too (liveness.py).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.distributed.liveness.ending import at_end
from torchgpipe.distributed.liveness.liveness import GRACE, Broken, Liveness, RankFailed, gist
from torchgpipe.distributed.liveness.patience import NOTICE, say
from torchgpipe.distributed.wires.cuda import NEVER, Transfer, connect
from torchgpipe.distributed.wires.wire import Message, Receiver, Sender, WireAddress
from torchgpipe.engine.relay import Stopped
from torchgpipe.skip.layout import Crossing
from torchgpipe.tensors.microbatch import Flat

KINDS = ("control", "forward", "backward", "forward skips", "backward skips", "word", "end")
"""What goes from rank to rank. Their numbers are gloo's tags."""

_NOTHING = torch.empty(0, device="cpu")

E = TypeVar("E", Sender, Receiver)


_open: weakref.WeakSet[Connections] = weakref.WeakSet()

_made: Counter[tuple[int, ...]] = Counter()
"""How often this process has met other ranks; they count alike, since each time all of them have to come."""


def _part_all(error: BaseException | None) -> None:
    for connections in [*_open]:
        if error is not None:
            connections.fail(error)
        connections.part()


_kept: list[dist.ProcessGroup] = []


def _leave() -> None:
    """Leave the connections of a process to it, in one that was forked from it, such as a data loader's worker."""
    for connections in [*_open]:
        # Never let go of: gloo's threads are not there, and to end them would crash.
        _kept.append(connections._group)
        for number, _ in connections._sockets & _sockets():  # or they would stay open when the other process ends
            os.close(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


def _sockets() -> set[tuple[int, str]]:
    """Return the sockets that this process has open, by number and name; none where the system does not list them."""
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it may be closed by now
                found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return {(number, name) for number, name in found if name.startswith("socket:")}


class Connections:
    """The wires of rank `own` of a group to all others.

    Attributes:
        liveness: what they say about themselves, and so the first failure of any of them; see there for `silence`.
        silence: as it was when these were made.
    """

    def __init__(self, ranks: Sequence[int], own: int, silence: float | None) -> None:
        self.own, self.n = own, len(ranks)
        self._others = [peer for peer in range(self.n) if peer != own]
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._met = False
        # Not by `new_group`: where groups have come and gone, ranks may give one group different names.
        which = (*ranks,)
        self._store = PrefixStore(f"torchgpipe/{which}/{_made[which]}", _get_default_store())
        self.silence = silence
        self._gather()
        _made[which] += 1  # now, as all others do, also if a connection fails
        before = _sockets()
        try:
            self._group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(self._store, own, self.n, NEVER))
        except RuntimeError as error:
            raise RankFailed(f"a rank has ended while rank {own} connected to all others ({gist(error)})") from None
        self._sockets = _sockets() - before  # gloo's, and perhaps one that another thread has opened meanwhile
        self._senders: dict[tuple[str, int], Sender] = {}
        self._receivers: dict[tuple[str, int], Receiver] = {}
        self.closed = self.parted = False
        self._closing = threading.RLock()
        self._process = os.getpid()
        # A second longer, so that the watch can say what is wrong.
        self._limit = NEVER if silence is None else timedelta(seconds=silence + 1)
        _open.add(self)
        at_end(_part_all)
        self.liveness = Liveness(own, self._others, partial(self._address, "word"), silence, self._disconnect)

    def _gather(self) -> None:
        """Wait until all ranks are about to connect, for as long as `init_process_group(timeout=...)` says."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]
        self._store.set(f"rank {self.own} is here", "")
        waited = timedelta()
        for until in sorted({min(timedelta(seconds=NOTICE), timeout), timeout}):
            try:
                return self._store.wait([f"rank {peer} is here" for peer in self._others], until - waited)
            except RuntimeError:
                missing = [str(peer) for peer in self._others if not self._store.check([f"rank {peer} is here"])]
            waited = until
            line = (
                f"rank {self.own} has waited for {waited.total_seconds():g} s for others to make their pipeline, or "
                f"to call it after close(), but there is no sign of rank {', '.join(missing)}"
            )
            if waited < timeout:
                say(line)
        raise RuntimeError(
            f"{line}; has it failed before? If it only takes longer, give init_process_group() a longer timeout"
        )

    def meet(self, serial: int, device: torch.device, crossings: Sequence[Crossing]) -> None:
        """Let ranks agree, in their first mini-batch, how tensors travel."""
        if not self._met:
            self._met = True
            first = partial(self.exchange, serial, "first call")
            connect(self._transfers, device, self.own, crossings, self._store, first)

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
        return end(self._address(kind, peer, partial(self.liveness.broken, peer)))

    def _address(self, kind: str, peer: int, broken: Broken) -> WireAddress:
        return WireAddress(self._group, peer, KINDS.index(kind), broken, self._transfers.get((kind, peer)), self._limit)

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
        with self.liveness.activity.hearing():
            message = receiver.take()
        check_serial(message, serial)
        told, about = message.about
        if told != what:
            raise RuntimeError(f"every rank has to call the same, but rank {peer} is at its {told}, not its {what}")
        return message.tensors, about

    def exchange(self, serial: int, what: str, own: Tensor) -> list[Tensor]:
        """Return what every rank gives, in their order; all do so for the same purpose."""
        self.tell(what, serial, (own.cpu(),))
        heard: Any = {peer: self.hear(what, serial, peer)[0][0] for peer in self._others}
        return [own if rank == self.own else heard[rank] for rank in range(self.n)]

    @property
    def sent(self) -> dict[tuple[str, int], int]:
        """Bytes of tensors that were sent, by kind and rank."""
        return {key: sender.sent for key, sender in self._senders.items()}

    @property
    def described(self) -> int:
        """How many descriptions of messages were sent."""
        return sum(sender.described for sender in self._senders.values())

    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this one has failed."""
        line, *_ = str(error).splitlines() or [""]
        doing = self.liveness.activity.doing
        self.liveness.fail(f"rank {self.own} failed {doing}: {type(error).__name__}{line and ': '}{line}")

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
            if os.getpid() != self._process:
                return  # a fork has no threads, and the connections are not its own
            if not self.closed and not self.liveness.stopped:
                for transfer in self._transfers.values():
                    transfer.finish()
                patience = threading.Timer(2 * GRACE, self.liveness.disconnect)
                patience.daemon = True
                patience.start()
                with suppress(RuntimeError, Stopped):
                    self.flush()
                patience.cancel()
                self.liveness.part()
                self.parted = True
            self.close()

    def close(self) -> None:
        """Close all connections, and end all threads; other ranks that wait for this one are told by that."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            threads = self.liveness.close()
            # A thread that is in gloo when Python ends may abort the process. But one that waits for sending to end may
            # stay there for ever.
            deadline = time.monotonic() + GRACE
            for thread in (*threads, *(sender.thread for sender in self._senders.values())):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _disconnect(self) -> None:
        """End all waits for other ranks, in all threads."""
        # Gloo closes the connections of a group if a wait times out. Whatever else should close them, such as
        # `abort()`, does not wake threads that wait. On a broken connection the receive fails at once. All this works
        # after `destroy_process_group()`, too.
        for peer in self._others:
            with suppress(RuntimeError):
                self._group.recv([_NOTHING], peer, KINDS.index("end")).wait(timedelta(milliseconds=1))
        for sender in [*self._senders.values()]:
            sender.stop()
        for transfer in [*self._transfers.values()]:
            transfer.abort()


def check_serial(message: Message, serial: int) -> None:
    """Raise `RuntimeError` if a message is of another mini-batch than this rank is in."""
    if message.serial != serial:
        raise RuntimeError(
            f"ranks are in different mini-batches, {message.serial} and {serial}: every rank has to call the pipeline, "
            "and then backward(), equally often and in one order; after a failure, call close() on all of them first"
        )
