"""What ranks tell each other about themselves: what they do, again and again (monitor.py), and in the end a last word.

The last word of a rank is that it has ended, or by which failure: its own, or one that it was told of. It disconnects
only when others have heard that. So where a connection breaks without a last word, a process has died.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from torchgpipe.distributed.liveness.monitor import Activity, Label, RankMonitor
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.wire import Receiver, Sender, WireAddress
from torchgpipe.engine.relay import Stopped
from torchgpipe.plain import packed, unpacked

GRACE = 1.0
"""Seconds in which other ranks have to hear a last word."""

_LABEL, _HEARD, _LAST = range(3)
"""What is told: what a rank does now; that it has heard a last word; its own last word."""

Broken = Callable[[BaseException], None]


class RankFailed(RuntimeError):
    """Another rank has failed; the message names it, and has its error."""


def gist(error: BaseException) -> str:
    """Return what gloo says has happened, without where in its source, and what that may come from."""
    return str(error).partition(". ")[0].rpartition("] ")[2]


class Liveness:
    """Tell all other ranks how rank `own` is, hear how they are, and keep the first failure of any rank: `stopped`.

    Each other rank has a wire both ways, by `address`, and a thread that listens to it. `timeout` and
    `beside` are the monitor's, and `disconnect` breaks all connections of this rank, not only these. `pending` says
    whether a message of a program is on its way to a rank.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        address: Callable[[int, Broken], WireAddress],
        timeout: float | None,
        disconnect: Callable[[], None],
        beside: list[Activity],
        pending: Callable[[int], bool],
    ) -> None:
        self._own, self._disconnect, self._pending = own, disconnect, pending
        self.stopped, self._error = (
            False,
            "",
        )  # a text: an error would keep the frames that it has come through alive
        self._told = threading.Event()  # others have heard of the error
        self._lost: dict[int, str] = {}  # what gloo said when the connection to a rank broke
        self._answered: set[int] = (
            set()
        )  # ranks that have heard this one's last word, or told their own
        self._changed = threading.Condition()
        # What does not arrive is no failure: who listens to that rank hears why.
        self._senders = {peer: Sender(address(peer, lambda error: None)) for peer in others}
        self._telling = threading.RLock()
        self.activity = Activity(self.fail, beside)
        self._monitor = RankMonitor(own, others, self.activity, timeout, self._tell)
        self._threads = [
            threading.Thread(
                target=self._listen,
                args=(peer, address),
                name=f"gpipe-listens-to-{peer}",
                daemon=True,
            )
            for peer in others
        ]
        for thread in self._threads:
            thread.start()

    def failure(self) -> BaseException:
        """Return why programs were stopped."""
        self._told.wait(2 * GRACE)
        return RankFailed(self._error or f"rank {self._own} has closed its connections")

    def fail(self, why: str, told_by: int | None = None) -> None:
        """Tell all other ranks that a rank has failed, and end all waits of this one. The first failure counts."""
        with self._changed:
            if self.stopped or self._monitor.ended.is_set():
                return  # what breaks once this rank has closed its connections is no failure
            self._error, self.stopped = why, True
        self.tell_last(why, told_by)
        self._told.set()
        self._disconnect()

    def tell_last(self, why: str | None = None, told_by: int | None = None) -> None:
        """Tell others that this rank has ended, or `why` one has failed, and wait: to close too early might lose it."""
        told = self._monitor.others - {told_by}
        for peer in told:
            self._tell(peer, (_LAST, why))
        awaited = {peer for peer in told if self._monitor.answers(peer)}
        with self._changed:
            self._changed.wait_for(lambda: awaited <= self._answered, GRACE)

    def broken(self, peer: int, error: BaseException) -> None:
        """Note that a connection has broken that was needed. Who listens to its rank finds out why."""
        with self._changed:
            self._lost[peer] = gist(error)
        self._check_not_needed(peer)

    def close(self) -> list[threading.Thread]:
        """Break all connections, once others have heard of a failure; return threads that are about to end."""
        if self.stopped:
            self._told.wait(2 * GRACE)
        self._monitor.ended.set()
        self._disconnect()
        self.activity.beside[:] = [
            each for each in self.activity.beside if each is not self.activity
        ]
        for sender in self._senders.values():
            sender.stop()
        return [
            *self._threads,
            *(sender.thread for sender in self._senders.values()),
            self._monitor.thread,
        ]

    def _check_not_needed(self, peer: int) -> None:
        """Fail if a rank has ended, and the connection to it has broken, which is noted only if it was needed."""
        with self._changed:
            line = self._lost.get(peer) if peer not in self._monitor.others else None
        if line is not None:
            self.fail(
                f"rank {peer} has ended, or called close(), but rank {self._own} needs more from it: every rank has to "
                f"call the pipeline, and then backward(), equally often ({line})"
            )

    def _tell(self, peer: int, told: Label | tuple[int, str | None]) -> None:
        """Tell a rank something; but not what this one does if what it was told last has not arrived yet."""
        label = isinstance(told, Label)
        with self._telling, suppress(Stopped):
            if not label or self._senders[peer].settled():
                self._senders[peer].give(
                    Message(0, None, (packed((_LABEL, *told) if label else told),))
                )

    def _listen(self, peer: int, address: Callable[[int, Broken], WireAddress]) -> None:
        """Hear what another rank tells, until its last word."""
        try:
            receiver = Receiver(address(peer, partial(self.broken, peer)))
            while (told := unpacked(receiver.take().tensors[0]))[0] != _LAST:
                if told[0] == _LABEL:
                    self._monitor.heard(peer, Label(*told[1:]))
                else:
                    self._has_heard(peer)
            _, why = told
            with self._telling, suppress(Stopped):
                self._senders[peer].give_last(Message(0, None, (packed((_HEARD,)),)))
        except Stopped:
            why = self._died(peer)
        self._has_heard(peer)  # it needs no last word any more
        if why is not None:
            self.fail(why, told_by=peer)
        else:
            with self._changed:
                self._monitor.forget(peer)
            self._check_not_needed(peer)
            # A message that gloo sends as the connection breaks may get lost, and the wait for it to end goes on.
            while not self._monitor.ended.wait(GRACE):
                if (
                    self._pending(peer)
                    and not self._monitor.ended.wait(GRACE)
                    and self._pending(peer)
                ):
                    return self.broken(peer, RuntimeError("a message to it was not received"))

    def _died(self, peer: int) -> str:
        if pause := self._monitor.pause():
            return f"rank {self._own} did not run for {pause:.1f} s (was its process stopped?), so others have ended"
        return (
            f"rank {peer} has closed its connections and given no reason: has its process ended?"
            f"{self._monitor.last(peer)} ({self._lost[peer]})"
        )

    def _has_heard(self, peer: int) -> None:
        with self._changed:
            self._answered.add(peer)
            self._changed.notify_all()
