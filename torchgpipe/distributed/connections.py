"""All channels from one rank to other ranks, and how connections end.

Every rank has channels to every other rank, one for each purpose:

    control    the first stage's rank announces that a mini-batch begins; all ranks exchange tensors
    loss       the last stage's rank sends the loss
    liveness   every rank sends what it is doing now (liveness/liveness.py)

Other channels carry activations and gradients from stage to stage (links.py), skips directly from
the rank that stashes them to the rank that pops them, and gradients of shared parameters (tied.py).

Connections end in one of three ways:

    close()      This rank needs nothing more. It waits until its messages are received, and tells
                 other ranks that it has ended. Other ranks can continue.
    fail(error)  This rank has raised an error. It tells other ranks, which raise `RankFailed`.
    abort()      Another rank has failed. This rank ends without a message of its own.

All three methods disconnect at the end. Then every thread of this process that waits for another
rank raises `Stopped`. The next call of the pipeline makes new connections.
"""

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.caught import in_one_line
from torchgpipe.distributed.alike import Settings, check_alike, in_other_mini_batches
from torchgpipe.distributed.channels.channel import ChannelAddress, tag_of
from torchgpipe.distributed.channels.message import NEVER, Message
from torchgpipe.distributed.channels.receiver import Receiver
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.distributed.channels.transfer import Stages, Transfers
from torchgpipe.distributed.liveness.ending import end_with_process, sockets
from torchgpipe.distributed.liveness.liveness import (
    END_SECONDS,
    Broken,
    Channels,
    Liveness,
    RankFailed,
    gist,
)
from torchgpipe.distributed.liveness.monitor import Activity
from torchgpipe.distributed.waiting import wait_for_all_ranks
from torchgpipe.engine.program import Program
from torchgpipe.engine.relay import Stopped
from torchgpipe.plain import packed, unpacked
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.where import note_rank, place_of
from torchgpipe.tensors.microbatch import Flat

E = TypeVar("E", Sender, Receiver)

_times_connected: Counter[tuple[int, ...]] = Counter()
"""How often this process has connected to the same ranks; the number is equal on these ranks."""

_beside = defaultdict[tuple[int, tuple[int, ...]], list[Activity]](list)
"""Maps this rank's index and the pipeline's ranks to the activities of all open connections."""


class Connections(Channels):
    """The channels of one rank of a pipeline to all other ranks.

    Args:
        ranks: The ranks of the pipeline, as numbered in the default process group.
        own: The index of this rank among `ranks`.
        timeout: The timeout of the pipeline in seconds (liveness/monitor.py); `None` sets no limit.

    Attributes:
        own, n, timeout: This rank's index, the number of ranks, and the timeout.
        serial: The number of the mini-batch that this rank runs now.
        ended: Whether the connections have ended.
        closed: Whether `close()` has ended the connections, and no rank had failed before.
        sockets: The sockets that this process opened while gloo connected the ranks.

    Raises:
        RankFailed: If another rank ends while the ranks connect.
    """

    def __init__(self, ranks: Sequence[int], own: int, timeout: float | None) -> None:
        self.own = own
        self.n = len(ranks)
        self.timeout = timeout
        self.serial = 0
        self._others = [peer for peer in range(self.n) if peer != own]
        # Not `new_group`: it names groups by their number, which can differ between processes.
        which = tuple(ranks)
        prefix = f"torchgpipe/{which}/{_times_connected[which]}"
        self._store = PrefixStore(prefix, _get_default_store())
        self._transfers = Transfers(own, self._store)
        self._met = False
        before = sockets()
        try:
            wait_for_all_ranks(self._store, own, self._others)
            _times_connected[which] += 1  # on all ranks, even if a connection fails below
            group = dist.ProcessGroupGloo(self._store, own, self.n, NEVER)
        except RankFailed:
            raise
        except RuntimeError as error:
            raise RankFailed(
                f"an unknown rank ended while rank {own} connected to others ({gist(error)}); look "
                "for an error in the output of every other rank"
            ) from None
        self._group = cast(dist.ProcessGroup, group)
        self.sockets = sockets() - before
        # Programs that this process starts must not inherit the sockets: such a program can run
        # longer than this process, and would keep the sockets open.
        for number, _ in self.sockets:
            with suppress(OSError):  # another thread may have closed its socket
                os.set_inheritable(number, False)
        self._ends: dict[tuple[type, str, int, Stages], Any] = {}
        self.ended = self.closed = False
        self._ending = threading.RLock()
        # This limit is one second longer, so that the monitor reports a problem first.
        self._limit = NEVER if timeout is None else timedelta(seconds=timeout + 1)
        end_with_process(self)
        self.liveness = Liveness(own, self._others, timeout, self, _beside[own, which])

    @contextmanager
    def call(self, serial: int, name: str, program: Program | None = None) -> Iterator[None]:
        """Run one call of the pipeline within this context, which tells failures to other ranks.

        Args:
            serial: The number of the mini-batch.
            name: The name of the call in error messages.
            program: The program (the rank's list of tasks) that the call runs, if already known.

        Raises:
            RankFailed: If another rank raises an error during its call.
            RuntimeError: If `close` has already ended the connections.
        """
        if self.closed:
            raise RuntimeError(
                "the pipeline's connections were closed by close() after the forward of this "
                "mini-batch; call backward() before close()"
            )
        self.serial = serial
        with self.liveness.activity.call(serial, name, program):
            try:
                if self.liveness.stopped:
                    raise Stopped
                yield
            except Stopped as stopped:
                # Remove the traceback, so that its frames are freed. The traceback only shows where
                # this rank waited for other ranks, which does not help the user.
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
        peers: Collection[int],
        *,
        late: bool,
    ) -> None:
        """Agree with all ranks, in the first mini-batch only, on how tensors are transferred.

        Args:
            device: This rank's device.
            placement: The rank of each stage.
            crossings: The skip connections from one stage to another.
            peers: The other ranks that share a parameter with this rank.
            late: Whether a skip is sent only shortly before it is needed (channels/transfer.py).
        """
        if not self._met:
            self._met = True
            exchange = partial(self.exchange, "first call")
            self._transfers.connect(device, placement, crossings, exchange, late=late)
            self._transfers.stage("tied gradients", peers, device)

    def channel(self, end: type[E], kind: str, peer: int, stages: Stages = (0, 0)) -> E:
        """Return this rank's end of a channel. The first call makes the end.

        Args:
            end: `Sender` or `Receiver`.
            kind: The kind of the channel, such as "loss" (`channel.KINDS` lists all kinds).
            peer: The other rank.
            stages: The two stages that the channel connects, the lower one first.
        """
        key = end, kind, peer, stages
        if key not in self._ends:
            address = self.address(kind, peer, partial(self.liveness.broken, peer), stages)
            self._ends[key] = end(address)
        return cast(E, self._ends[key])

    def address(
        self, kind: str, peer: int, broken: Broken, stages: Stages = (0, 0)
    ) -> ChannelAddress:
        """Return the address of a channel between this rank and `peer`."""
        transfer = self._transfers.by_channel.get((kind, peer, stages))
        return ChannelAddress(
            self._group, peer, tag_of(kind, stages), broken, transfer, self._limit
        )

    def _senders(self) -> list[Sender]:
        return [end for end in [*self._ends.values()] if isinstance(end, Sender)]

    def message(self, about: Any, tensors: Flat) -> Message:
        """Make a message from this mini-batch's number, Python values (`about`) and tensors."""
        return Message(self.serial, about, tensors)

    def take(self, receiver: Receiver, what: str | None = None) -> tuple[Any, Flat]:
        """Wait for the next message of a channel; return the message's plain values and tensors.

        Args:
            receiver: The end of the channel.
            what: The name of the message if it is sent with `tell`, for an error message.

        Raises:
            RuntimeError: If the message belongs to another mini-batch than the one that this rank
                runs.
        """
        message = receiver.take()
        if message.serial != self.serial:
            raise in_other_mini_batches(self.own, self.serial, what, receiver.rank, message)
        return message.about, message.tensors

    def tell(self, what: str, tensors: Flat, about: Hashable = None, kind: str = "control") -> None:
        """Send a message to all other ranks, each of which has to call `hear`.

        Args:
            what: A name for the message. Other ranks compare it with the name that they expect.
            tensors: The tensors of the message.
            about: Plain Python values that are sent in the same message.
            kind: The kind of the channel, such as "loss" (`channel.KINDS` lists all kinds).
        """
        for peer in self._others:
            sender = self.channel(Sender, kind, peer)
            sender.begin()
            sender.give(self.message((what, about), tensors))

    def hear(self, what: str, peer: int, kind: str = "control") -> tuple[Any, Sequence[Any]]:
        """Wait for a message that a rank sends with `tell`; return its plain values and tensors.

        Args:
            what: The name that the message has to have.
            peer: The rank that sends.
            kind: The kind of the channel, such as "loss" (`channel.KINDS` lists all kinds).

        Raises:
            RuntimeError: If the message has another name, because the ranks make different calls.
        """
        receiver = self.channel(Receiver, kind, peer)
        receiver.begin()
        self.liveness.activity.hears = True
        (told, about), tensors = self.take(receiver, what)
        self.liveness.activity.hears = False
        if told != what:
            raise RuntimeError(
                f"all ranks have to make the same calls in the same order, but rank {peer} has "
                f"sent the message {told!r}, while this rank waits for the message {what!r}"
            )
        return about, tensors

    def exchange(self, what: str, tensor: Tensor, alike: Settings | None = None) -> list[Tensor]:
        """Send a tensor to all ranks; return the tensors of all ranks, in the order of ranks.

        Args:
            what: A name for the purpose of the exchange, which has to be the same on all ranks.
            tensor: The tensor of this rank.
            alike: Settings that are compared, because they have to be the same on all ranks.
        """
        settings = alike or {}
        self.tell(what, (tensor.cpu(), packed(settings)))
        heard = {}
        for peer in self._others:
            _, heard[peer] = self.hear(what, peer)
        for peer, (_, theirs) in heard.items():
            check_alike(what, settings, unpacked(theirs), self.own, peer)
        return [tensor if rank == self.own else heard[rank][0] for rank in range(self.n)]

    def deliver(self, patience: float | None = None) -> None:
        """Send all delayed messages, and wait until other ranks have received all messages.

        Raises:
            queue.Empty: If a message is not received within `patience` seconds.
        """
        senders = self._senders()
        for sender in senders:
            sender.release()
        for sender in senders:
            sender.settle(patience=patience)

    def pending(self, peer: int) -> bool:
        """Return whether the rank `peer` still has to receive messages of this rank."""
        return any(sender.pending > 0 for sender in self._senders() if sender.rank == peer)

    def close(self) -> None:
        """End the connections because this rank needs nothing more from other ranks."""
        with self._ending:
            if not self.ended and not self.liveness.stopped:
                self._transfers.finish()
                with suppress(RuntimeError, Stopped, Empty):
                    self.deliver(2 * END_SECONDS)
                self.liveness.tell_last()
                self.closed = True
            self.abort()

    def fail(self, error: BaseException) -> None:
        """End the connections because an error was raised on this rank."""
        doing, why, place = self.liveness.activity.doing, in_one_line(error), place_of(error)
        where = f" (in {place})" if place else ""
        self.liveness.fail(f"rank {self.own} failed {doing}: {why}{where}")
        self.abort()

    def abort(self) -> None:
        """Disconnect from all other ranks and end the threads; send no final message to the ranks.

        If a rank has failed, first wait (for at most two seconds) until other ranks know of this.
        """
        with self._ending:
            if self.ended:
                return
            self.ended = True
            threads = [*self.liveness.close(), *[sender.thread for sender in self._senders()]]
            # If Python ends while a thread is inside gloo's code, the process can crash. So wait
            # for the threads, but only until a deadline, as some may stay in gloo for ever.
            deadline = time.monotonic() + END_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def disconnect(self) -> None:
        """Break all connections, so that no thread of this process waits for other ranks."""
        # This uses a side effect: when a wait times out, gloo closes all connections of the group.
        # So wait for 1 ms for a message that never comes, and ignore the error. This also works
        # after `destroy_process_group()`. (`abort()` of the group would not wake waiting threads.)
        tag = tag_of("nothing", (0, 0))
        for peer in self._others:
            with suppress(RuntimeError):
                nothing = torch.empty(0, device="cpu")
                self._group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
        for sender in self._senders():
            sender.stop()
        self._transfers.abort()
