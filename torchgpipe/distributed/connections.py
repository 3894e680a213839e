"""All wires of one rank, and how their connections end.

Every rank has a control wire to every other. On it the first stage's rank tells when a mini-batch begins. The last
stage's tells the loss, from which a GPU would have to be read, on another one. Programs' items have wires of their own
(links.py), and so have skips, which go straight from the rank that stashes to the rank that pops. What ranks tell about
themselves has wires, too (liveness.py).

Connections end in one of three ways, after which the next call of the pipeline makes new ones:

    close()      This rank needs nothing more. What it has sent is received first. Others are told, and may go on.
    fail(error)  An error was raised on this rank. Others are told, and raise `RankFailed`.
    abort()      Another rank has failed, or there is no time. Others are told nothing.

All three disconnect in the end, so that every thread of this process that waits for another rank raises `Stopped`.
"""

import os
import platform
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchgpipe.distributed.liveness.ending import end_with_process, sockets
from torchgpipe.distributed.liveness.liveness import GRACE, Broken, Liveness, RankFailed, gist
from torchgpipe.distributed.liveness.monitor import Activity
from torchgpipe.distributed.wires.cuda import NEVER, Transfer, connect
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.wire import Receiver, Sender, WireAddress
from torchgpipe.engine.program import Program
from torchgpipe.engine.relay import Stopped
from torchgpipe.patience import NOTICE, say
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
"""What goes from rank to rank. Their numbers, and those of the two stages between which it goes, make gloo's tags."""

Stages = tuple[int, int]

E = TypeVar("E", Sender, Receiver)

_made: Counter[tuple[int, ...]] = Counter()
"""How often this process has met other ranks; they count alike, since each time all of them have to come."""

_beside = defaultdict[tuple[int, tuple[int, ...]], list[Activity]](
    list
)  # of open ones, by own rank and all ranks


class Connections:
    """The wires of rank `own` of a group to all others; see liveness.py for `timeout`.

    `closed` says whether they have ended, `parted` whether that was by `close()`, and no rank had failed. `serial` is
    the number of the mini-batch that this rank's call is for. `sockets` are gloo's, and perhaps another thread's.
    """

    def __init__(self, ranks: Sequence[int], own: int, timeout: float | None) -> None:
        self.own, self.n, self.timeout = own, len(ranks), timeout
        self._others = [peer for peer in range(self.n) if peer != own]
        self._transfers: dict[tuple[str, int, Stages], Transfer] = {}
        self._met, self.serial = False, 0
        # Not by `new_group`: where groups have come and gone, ranks may give one group different names.
        which = (*ranks,)
        self._store = PrefixStore(f"torchgpipe/{which}/{_made[which]}", _get_default_store())
        before = sockets()
        try:
            self._gather()
            _made[which] += 1  # now, as all others do, also if a connection fails
            self._group = cast(
                dist.ProcessGroup, dist.ProcessGroupGloo(self._store, own, self.n, NEVER)
            )
        except RankFailed:
            raise
        except RuntimeError as error:
            raise RankFailed(
                f"an unknown rank ended while rank {own} connected to others ({gist(error)})"
            ) from None
        self.sockets = sockets() - before
        for number, _ in self.sockets:
            with suppress(OSError):  # another thread's, and closed by now
                os.set_inheritable(number, False)  # a program that this one starts may outlive it
        self._ends: dict[tuple[type, str, int, Stages], Any] = {}
        self.closed = self.parted = False
        self._ending = threading.RLock()
        # A second longer, so that the monitor can say what is wrong.
        self._limit = NEVER if timeout is None else timedelta(seconds=timeout + 1)
        end_with_process(self)
        self.liveness = Liveness(
            own,
            self._others,
            partial(self._address, "liveness"),
            timeout,
            self._disconnect,
            _beside[own, which],
            pending=lambda to: any(sender.pending > 0 for sender in self._senders(to)),
        )

    @contextmanager
    def call(self, serial: int, name: str, program: Program | None = None) -> Iterator[None]:
        """Enter a call for mini-batch `serial`, which may run a program. If one rank raises within, all others do."""
        if self.parted:
            raise RuntimeError(
                "the pipeline's connections were closed by close() since this mini-batch; call backward() first"
            )
        self.serial = serial
        with self.liveness.activity.call(serial, name, program):
            try:
                if self.liveness.stopped:
                    raise Stopped
                yield
            except Stopped as stopped:
                stopped.__traceback__ = (
                    None  # as by `caught`, and all of it: nobody sees where this rank waited
                )
                try:
                    raise self.liveness.failure() from None
                finally:
                    self.abort()
            except BaseException as error:
                self.fail(error)
                note_rank(error, self.own)
                raise

    def _gather(self) -> None:
        """Wait until all ranks are about to connect, for as long as `init_process_group(timeout=...)` says."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]
        here = f"process {os.getpid()} on {platform.node()}"
        if (
            first := self._store.compare_set(f"rank {self.own} is here", "", here).decode()
        ) != here:
            raise RankFailed(
                f"rank {self.own} is {first}, and {here} says the same: start each rank only once"
            )
        waited = timedelta()
        for until in sorted({min(timedelta(seconds=NOTICE), timeout), timeout}):
            try:
                return self._store.wait(
                    [f"rank {peer} is here" for peer in self._others], until - waited
                )
            except RuntimeError:
                missing = [
                    str(peer)
                    for peer in self._others
                    if not self._store.check([f"rank {peer} is here"])
                ]
            waited = until
            line = (
                f"rank {self.own} has waited for {waited.total_seconds():g} s for others to make their pipeline, or "
                f"to call it after close(), but there is no sign of rank {', '.join(missing)}"
            )
            if waited < timeout:
                say(line)
        raise RankFailed(
            f"{line}; has it failed before? If it only takes longer, give init_process_group() a longer timeout"
        )

    def meet(
        self,
        device: torch.device,
        placement: Sequence[int],
        crossings: Sequence[Crossing],
        *,
        late: bool,
    ) -> None:
        """Let ranks agree, in their first mini-batch, how tensors travel."""
        if not self._met:
            self._met = True
            first = partial(self.exchange, "first call")
            connect(
                self._transfers,
                device,
                self.own,
                placement,
                crossings,
                self._store,
                first,
                late=late,
            )

    def wire(self, end: type[E], kind: str, peer: int, stages: Stages = (0, 0)) -> E:
        """Return this rank's end of a wire to or from another one, made when first asked for."""
        key = end, kind, peer, stages
        if key not in self._ends:
            self._ends[key] = end(
                self._address(kind, peer, partial(self.liveness.broken, peer), stages)
            )
        return cast(E, self._ends[key])

    def _senders(self, to: int | None = None) -> list[Sender]:
        ends = [*self._ends.items()]
        return [
            end for (_, _, peer, _), end in ends if isinstance(end, Sender) and to in (None, peer)
        ]

    def _address(
        self, kind: str, peer: int, broken: Broken, stages: Stages = (0, 0)
    ) -> WireAddress:
        tag = KINDS.index(kind) + len(KINDS) * (stages[0] << 12 | stages[1])
        return WireAddress(
            self._group, peer, tag, broken, self._transfers.get((kind, peer, stages)), self._limit
        )

    def take(self, receiver: Receiver) -> tuple[Any, Flat]:
        """Wait for the next message of a wire; return what is said of its tensors, and these."""
        message = receiver.take()
        if message.serial != self.serial:
            raise RuntimeError(
                f"rank {receiver._rank} is in mini-batch {message.serial}, and rank {self.own} in {self.serial}: every "
                "rank has to call the pipeline, and then backward(), equally often and in one order; after a failure, "
                "call close() on all of them first"
            )
        return message.about, message.tensors

    def tell(self, what: str, tensors: Flat, about: Hashable = None, kind: str = "control") -> None:
        """Tell all other ranks something; each of them has to hear it."""
        for peer in self._others:
            sender = self.wire(Sender, kind, peer)
            sender.begin()
            sender.give(Message(self.serial, (what, about), tensors))

    def hear(self, what: str, peer: int, kind: str = "control") -> tuple[Sequence[Any], Any]:
        """Wait for what a rank tells all others; return the tensors, and what is said of them."""
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

    def exchange(
        self, what: str, own: Tensor, alike: Mapping[str, Any] | None = None
    ) -> list[Tensor]:
        """Return what every rank gives, in their order; all do so for the same purpose, and with what is `alike`."""
        self.tell(what, (own.cpu(), packed(alike or {})))
        heard = {peer: self.hear(what, peer)[0] for peer in self._others}
        for peer, (_, theirs) in heard.items():
            self.check_alike(what, alike or {}, unpacked(theirs), peer)
        return [own if rank == self.own else heard[rank][0] for rank in range(self.n)]

    def check_alike(
        self, what: str, own: Mapping[str, Any], theirs: Mapping[str, Any], peer: int
    ) -> None:
        """Raise `ValueError` if this rank and another one call the same with other settings."""
        for name, value in own.items():
            if repr(value) != repr(other := theirs.get(name)):  # NaN is not equal to itself
                raise ValueError(
                    f"every rank has to call {what} alike, but {name} is {other!r} on rank {peer} and {value!r} on "
                    f"rank {self.own}"
                )

    def deliver(self, patience: float | None = None) -> None:
        """Send what would be sent later, as the program has no more tasks, and wait until other ranks have it all.

        If a message takes longer than `patience` seconds, `queue.Empty` is raised.
        """
        senders = self._senders()
        for sender in senders:
            sender.release()
        for sender in senders:
            sender.settle(patience=patience)

    def close(self) -> None:
        """End them where this rank needs nothing more from others."""
        with self._ending:
            if not self.closed and not self.liveness.stopped:
                for transfer in self._transfers.values():
                    transfer.finish()
                with suppress(RuntimeError, Stopped, Empty):
                    self.deliver(2 * GRACE)
                self.liveness.tell_last()
                self.parted = True
            self.abort()

    def fail(self, error: BaseException) -> None:
        """End them where an error was raised on this rank."""
        line, *_ = str(error).splitlines() or [""]
        doing = self.liveness.activity.doing
        self.liveness.fail(
            f"rank {self.own} failed {doing}: {type(error).__name__}{line and ': '}{line}"
        )
        self.abort()

    def abort(self) -> None:
        """End them at once, but for a failure that others have to be told of, and end all threads."""
        with self._ending:
            if self.closed:
                return
            self.closed = True
            threads = self.liveness.close()
            # A thread that is in gloo when Python ends may abort the process. But one that waits for sending to end may
            # stay there for ever.
            deadline = time.monotonic() + GRACE
            for thread in (*threads, *(sender.thread for sender in self._senders())):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _disconnect(self) -> None:
        """End all waits for other ranks, in all threads."""
        # Gloo closes the connections of a group if a wait times out. Whatever else should close them, such as
        # `abort()`, does not wake threads that wait. On a broken connection the receive fails at once. All this works
        # after `destroy_process_group()`, too.
        for peer in self._others:
            with suppress(RuntimeError):
                never = self._group.recv(
                    [torch.empty(0, device="cpu")], peer, KINDS.index("nothing")
                )
                never.wait(timedelta(milliseconds=1))
        for sender in self._senders():
            sender.stop()
        for transfer in [*self._transfers.values()]:
            transfer.abort()
