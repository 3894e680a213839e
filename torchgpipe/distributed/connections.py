"""All wires of one rank to the other ranks, and how their connections end.

Every rank has wires to every other rank, one for each purpose:

    control    the first stage's rank tells that a mini-batch begins
    loss       the last stage's rank tells the loss, which may have to be read from a GPU
    liveness   every rank tells how it is (liveness/liveness.py)

Other wires carry items of programs from stage to stage (links.py). Skips have wires of their own,
straight from the rank that stashes a skip to the rank that pops it.

Connections end in one of three ways, after which the next call of the pipeline makes new ones:

    close()      This rank needs nothing more. All that it has sent is received first. Other ranks
                 are told, and may go on.
    fail(error)  An error was raised on this rank. Other ranks are told, and raise `RankFailed`.
    abort()      Another rank has failed, or there is no time left. Other ranks are told nothing.

In the end, all three disconnect. Then every thread of this process that waits for another rank
raises `Stopped`.
"""

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.distributed.alike import Settings, check_alike
from torchgpipe.distributed.gathering import gather
from torchgpipe.distributed.liveness.ending import end_with_process, sockets
from torchgpipe.distributed.liveness.liveness import GRACE, Broken, Liveness, RankFailed, gist
from torchgpipe.distributed.liveness.monitor import Activity
from torchgpipe.distributed.wires.cuda import NEVER, Stages, Transfers
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.receiver import Receiver
from torchgpipe.distributed.wires.sender import Sender
from torchgpipe.distributed.wires.wire import WireAddress
from torchgpipe.engine.program import Program
from torchgpipe.engine.relay import Stopped
from torchgpipe.plain import packed, unpacked
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.where import note_rank
from torchgpipe.tensors.microbatch import Flat

KINDS = (
    "control",
    "forward",
    "backward",
    "forward skips",
    "backward skips",
    "liveness",
    "nothing",
    "loss",
)
"""The kinds of wires. A kind's index and the two stages of a wire make the tag that gloo needs."""

E = TypeVar("E", Sender, Receiver)

_made: Counter[tuple[int, ...]] = Counter()
"""How often this process has met the same ranks; all of them count this alike."""

_beside = defaultdict[tuple[int, tuple[int, ...]], list[Activity]](list)
"""The activities of all open connections, by this rank's index and the ranks of the pipeline."""


class Connections:
    """The wires of one rank of a pipeline to all other ranks.

    Args:
        ranks: The ranks of the pipeline, as numbered in the default process group.
        own: The index of this rank among `ranks`.
        timeout: The timeout of the pipeline in seconds (liveness/monitor.py), or `None` for none.

    Attributes:
        own, n, timeout: This rank's index, the number of ranks, and the timeout.
        serial: The number of the mini-batch of this rank's present call.
        closed: Whether the connections have ended.
        parted: Whether they have ended by `close()`, while no rank had failed.
        sockets: The sockets of gloo. There may be sockets of another thread among them.
    """

    def __init__(self, ranks: Sequence[int], own: int, timeout: float | None) -> None:
        self.own = own
        self.n = len(ranks)
        self.timeout = timeout
        self.serial = 0
        self._others = [peer for peer in range(self.n) if peer != own]
        # The process group is not made by `new_group`. That function names groups by their number,
        # and where groups have come and gone, ranks may have different numbers.
        which = tuple(ranks)
        name = f"torchgpipe/{which}/{_made[which]}"
        self._store = PrefixStore(name, _get_default_store())
        self._transfers = Transfers(own, self._store)
        self._met = False
        before = sockets()
        try:
            gather(self._store, own, self._others)
            _made[which] += 1  # all ranks count this meeting, even if a connection fails below
            group = dist.ProcessGroupGloo(self._store, own, self.n, NEVER)
        except RankFailed:
            raise
        except RuntimeError as error:
            raise RankFailed(
                f"an unknown rank ended while rank {own} connected to others ({gist(error)})"
            ) from None
        self._group = cast(dist.ProcessGroup, group)
        self.sockets = sockets() - before
        for number, _ in self.sockets:
            with suppress(OSError):  # a socket of another thread may be closed by now
                # A program that this process starts may outlive it, and must not keep the socket.
                os.set_inheritable(number, False)
        self._ends: dict[tuple[type, str, int, Stages], Any] = {}
        self.closed = self.parted = False
        self._ending = threading.RLock()
        # The limit is a second longer, so that the monitor is the first to say what is wrong.
        self._limit = NEVER if timeout is None else timedelta(seconds=timeout + 1)
        end_with_process(self)
        self.liveness = Liveness(own, self._others, timeout, self, _beside[own, which])

    @contextmanager
    def call(self, serial: int, name: str, program: Program | None = None) -> Iterator[None]:
        """Enter a call of the pipeline. If one rank raises within its call, all others do, too.

        Args:
            serial: The number of the mini-batch.
            name: What the call does, for messages.
            program: The program that the call runs, if it is known already.
        """
        if self.parted:
            raise RuntimeError(
                "the pipeline's connections were closed by close() since this mini-batch; call "
                "backward() first"
            )
        self.serial = serial
        with self.liveness.activity.call(serial, name, program):
            try:
                if self.liveness.stopped:
                    raise Stopped
                yield
            except Stopped as stopped:
                # The user need not see where this rank waited, and its frames are let go of.
                stopped.__traceback__ = None
                try:
                    raise self.liveness.failure() from None
                finally:
                    self.abort()
            except BaseException as error:
                self.fail(error)
                note_rank(error, self.own)
                raise

    def meet(
        self,
        device: torch.device,
        placement: Sequence[int],
        crossings: Sequence[Crossing],
        *,
        late: bool,
    ) -> None:
        """Let all ranks agree in their first mini-batch how tensors travel; later do nothing.

        Args:
            device: This rank's device.
            placement: The rank of each stage.
            crossings: The skips that leave their stage.
            late: Whether skips leave later than they are made (wires/cuda.py).
        """
        if not self._met:
            self._met = True
            exchange = partial(self.exchange, "first call")
            self._transfers.connect(device, placement, crossings, exchange, late=late)

    def wire(self, end: type[E], kind: str, peer: int, stages: Stages = (0, 0)) -> E:
        """Return this rank's end of a wire to or from another rank, and make it at the first call.

        Args:
            end: `Sender` or `Receiver`.
            kind: One of `KINDS`.
            peer: The other rank.
            stages: The two stages that the wire connects, the lower one first.
        """
        key = end, kind, peer, stages
        if key not in self._ends:
            broken = partial(self.liveness.broken, peer)
            self._ends[key] = end(self.address(kind, peer, broken, stages))
        return cast(E, self._ends[key])

    def address(self, kind: str, peer: int, broken: Broken, stages: Stages = (0, 0)) -> WireAddress:
        """Return the address of a `wire`; `broken` is called if the connection breaks."""
        low, high = stages
        tag = KINDS.index(kind) + len(KINDS) * (low << 12 | high)
        transfer = self._transfers.made.get((kind, peer, stages))
        return WireAddress(self._group, peer, tag, broken, transfer, self._limit)

    def _senders(self) -> list[Sender]:
        ends = list(self._ends.values())
        return [end for end in ends if isinstance(end, Sender)]

    def give(self, sender: Sender, about: Any, tensors: Flat) -> None:
        """Send a message of this mini-batch: tensors, and plain values `about` them."""
        sender.give(Message(self.serial, about, tensors))

    def take(self, receiver: Receiver) -> tuple[Any, Flat]:
        """Wait for the next message of a wire; return its `about` and its tensors."""
        message = receiver.take()
        if message.serial != self.serial:
            raise RuntimeError(
                f"rank {receiver.rank} is in mini-batch {message.serial}, and rank {self.own} in "
                f"{self.serial}: every rank has to call the pipeline, and then backward(), equally "
                "often and in one order; after a failure, call close() on all of them first"
            )
        return message.about, message.tensors

    def tell(self, what: str, tensors: Flat, about: Hashable = None, kind: str = "control") -> None:
        """Send a message to all other ranks, each of which has to `hear` it.

        Args:
            what: A name for the message, which ranks that hear it compare with what they expect.
            tensors: The tensors of the message.
            about: What the message says beside, in plain values.
            kind: One of `KINDS`.
        """
        for peer in self._others:
            sender = self.wire(Sender, kind, peer)
            sender.begin()
            self.give(sender, (what, about), tensors)

    def hear(self, what: str, peer: int, kind: str = "control") -> tuple[Sequence[Any], Any]:
        """Wait for what a rank tells all others; return the tensors and the message's `about`."""
        receiver = self.wire(Receiver, kind, peer)
        receiver.begin()
        self.liveness.activity.hears = True
        (told, about), tensors = self.take(receiver)
        self.liveness.activity.hears = False
        if told != what:
            raise RuntimeError(
                f"every rank has to call the same, but rank {peer} is at its {told}, not its {what}"
            )
        return tensors, about

    def exchange(self, what: str, own: Tensor, alike: Settings | None = None) -> list[Tensor]:
        """Return the tensors that all ranks give to this call, in the order of ranks.

        Args:
            what: The purpose of the exchange, which has to be the same on all ranks.
            own: The tensor of this rank.
            alike: Settings that have to be the same on all ranks.
        """
        settings = alike or {}
        self.tell(what, (own.cpu(), packed(settings)))
        heard = {}
        for peer in self._others:
            heard[peer], _ = self.hear(what, peer)
        given = []
        for rank in range(self.n):
            if rank == self.own:
                given.append(own)
            else:
                theirs, their_settings = heard[rank]
                check_alike(what, settings, unpacked(their_settings), self.own, rank)
                given.append(theirs)
        return given

    def deliver(self, patience: float | None = None) -> None:
        """Send all messages that would leave later, and wait until other ranks have all of them.

        This is called when the program has no more tasks.

        Raises:
            queue.Empty: If a message takes longer than `patience` seconds.
        """
        senders = self._senders()
        for sender in senders:
            sender.release()
        for sender in senders:
            sender.settle(patience=patience)

    def pending(self, peer: int) -> bool:
        """Return whether a message of a program is on its way to another rank."""
        return any(sender.pending > 0 for sender in self._senders() if sender.rank == peer)

    def close(self) -> None:
        """End the connections because this rank needs nothing more from others."""
        with self._ending:
            if not self.closed and not self.liveness.stopped:
                self._transfers.finish()
                with suppress(RuntimeError, Stopped, Empty):
                    self.deliver(2 * GRACE)
                self.liveness.tell_last()
                self.parted = True
            self.abort()

    def fail(self, error: BaseException) -> None:
        """End the connections because an error was raised on this rank."""
        why = type(error).__name__
        lines = str(error).splitlines()
        if lines and lines[0]:
            why = f"{why}: {lines[0]}"
        self.liveness.fail(f"rank {self.own} failed {self.liveness.activity.doing}: {why}")
        self.abort()

    def abort(self) -> None:
        """End the connections and all threads at once, except that others are told of a failure."""
        with self._ending:
            if self.closed:
                return
            self.closed = True
            threads = self.liveness.close()
            for sender in self._senders():
                threads.append(sender.thread)
            # A thread that is in gloo when Python ends may abort the process. But a thread that
            # waits until a message is sent may never return.
            deadline = time.monotonic() + GRACE
            for thread in threads:
                left = deadline - time.monotonic()
                thread.join(max(0.0, left))

    def disconnect(self) -> None:
        """End all waits for other ranks, in all threads."""
        # Gloo closes the connections of a group when a wait times out. `abort()` should do so, too,
        # but it does not wake threads that wait. On a broken connection the receive fails at once.
        # All this works even after `destroy_process_group()`.
        tag = KINDS.index("nothing")
        for peer in self._others:
            with suppress(RuntimeError):
                never = self._group.recv([torch.empty(0, device="cpu")], peer, tag)
                never.wait(timedelta(milliseconds=1))
        for sender in self._senders():
            sender.stop()
        self._transfers.abort()
