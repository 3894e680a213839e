"""What ranks tell each other about themselves: what each of them does, and in the end a last word.

A rank tells again and again what it does (monitor.py). Its last word is either that it has ended,
or a failure: its own one, or one that it was told of. A rank disconnects only when other ranks have
heard its last word. So if a connection breaks without a last word, a process has died.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from torchgpipe.distributed.liveness.monitor import Activity, Label, RankMonitor
from torchgpipe.distributed.wires.message import Message
from torchgpipe.distributed.wires.receiver import Receiver
from torchgpipe.distributed.wires.sender import Sender
from torchgpipe.distributed.wires.wire import WireAddress
from torchgpipe.engine.relay import Stopped
from torchgpipe.plain import packed, unpacked

GRACE = 1.0
"""Seconds in which other ranks have to hear a last word."""

_LABEL, _HEARD, _LAST = range(3)
"""What a message says: what a rank does now; that it has heard a last word; its own last word."""

Broken = Callable[[BaseException], None]
"""A function that is called with the error of gloo when a connection breaks."""


class RankFailed(RuntimeError):
    """Another rank has failed. The message names the rank and has its error."""


def gist(error: BaseException) -> str:
    """Return what has happened, from an error of gloo.

    The places in gloo's source, and gloo's list of possible reasons, are left out.
    """
    sentence, _, _ = str(error).partition(". ")
    _, _, what = sentence.rpartition("] ")
    return what


class Wires(Protocol):
    """What `Liveness` needs of the connections of its rank; see `Connections`."""

    def address(self, kind: str, peer: int, broken: Broken) -> WireAddress:
        """Return the address of a wire to or from another rank."""

    def pending(self, peer: int) -> bool:
        """Return whether a message of a program is on its way to another rank."""

    def disconnect(self) -> None:
        """Break all connections of this rank, so that no thread waits any more."""


class Liveness:
    """Tell all other ranks how this rank is, and hear how they are.

    There is a wire to each other rank, a wire from it, and a thread that listens to it.

    Args:
        own: This rank.
        others: All other ranks.
        timeout: The timeout of the monitor.
        wires: The connections of this rank.
        beside: The activities of other pipelines, to which the own one is added (monitor.py).

    Attributes:
        activity: What this rank does now.
        stopped: Whether any rank has failed.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        timeout: float | None,
        wires: Wires,
        beside: list[Activity],
    ) -> None:
        self._own = own
        self._wires = wires
        self.stopped = False
        # The first failure of any rank. It is a text, since an error would keep the frames alive
        # that it has come through.
        self._failure = ""
        self._told = threading.Event()  # set when others have heard of the failure
        self._lost: dict[int, str] = {}  # gloo's error for each broken connection
        # The ranks that have heard this rank's last word, or have told their own.
        self._answered: set[int] = set()
        self._changed = threading.Condition()
        self._senders: dict[int, Sender] = {}
        for peer in others:
            # A message that does not arrive is no failure. The thread that listens to that rank
            # finds out why.
            address = wires.address("liveness", peer, lambda error: None)
            self._senders[peer] = Sender(address)
        self._telling = threading.RLock()
        self.activity = Activity(self.fail, beside)
        self._monitor = RankMonitor(own, others, self.activity, timeout, self._tell_label)
        self._threads: list[threading.Thread] = []
        for peer in others:
            name = f"gpipe-listens-to-{peer}"
            thread = threading.Thread(target=self._listen, args=(peer,), name=name, daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def failure(self) -> BaseException:
        """Return the error that says why programs were stopped."""
        self._told.wait(2 * GRACE)
        return RankFailed(self._failure or f"rank {self._own} has closed its connections")

    def fail(self, why: str, told_by: int | None = None) -> None:
        """Tell all other ranks that a rank has failed, and end all waits of this rank.

        Only the first failure counts.

        Args:
            why: A line that names the rank and its error.
            told_by: The rank that has told this one of the failure.
        """
        with self._changed:
            if self.stopped or self._monitor.ended.is_set():
                return  # after this rank has closed its connections, a broken one is no failure
            self._failure = why
            self.stopped = True
        self.tell_last(why, told_by)
        self._told.set()
        self._wires.disconnect()

    def tell_last(self, why: str | None = None, told_by: int | None = None) -> None:
        """Tell other ranks this rank's last word, and wait until they have heard it.

        A connection that is closed too early may lose the message.

        Args:
            why: The failure, or `None` if this rank has ended without one.
            told_by: A rank that knows of the failure already.
        """
        told = self._monitor.others - {told_by}
        for peer in told:
            self._tell(peer, _LAST, why)
        awaited = {peer for peer in told if self._monitor.answers(peer)}
        with self._changed:
            self._changed.wait_for(lambda: awaited <= self._answered, GRACE)

    def broken(self, peer: int, error: BaseException) -> None:
        """Note that a connection has broken which this rank needed.

        The thread that listens to the other rank finds out why.
        """
        with self._changed:
            self._lost[peer] = gist(error)
        self._check_not_needed(peer)

    def close(self) -> list[threading.Thread]:
        """Break all connections, and return the threads, which are about to end.

        If there is a failure, other ranks hear of it before.
        """
        if self.stopped:
            self._told.wait(2 * GRACE)
        self._monitor.ended.set()
        self._wires.disconnect()
        beside = self.activity.beside
        beside[:] = [each for each in beside if each is not self.activity]
        threads = list(self._threads)
        for sender in self._senders.values():
            sender.stop()
            threads.append(sender.thread)
        threads.append(self._monitor.thread)
        return threads

    def _check_not_needed(self, peer: int) -> None:
        """Fail if a rank has ended while this rank still needs it.

        Only connections that were needed are noted as broken.
        """
        with self._changed:
            has_ended = peer not in self._monitor.others
            why = self._lost.get(peer) if has_ended else None
        if why is not None:
            self.fail(
                f"rank {peer} has ended, or called close(), but rank {self._own} needs more from "
                "it: every rank has to call the pipeline, and then backward(), equally often "
                f"({why})"
            )

    def _tell(self, peer: int, *told: Any) -> None:
        """Tell a rank something, unless this rank has disconnected."""
        with self._telling, suppress(Stopped):
            self._senders[peer].give(_message(*told))

    def _tell_label(self, peer: int, label: Label) -> None:
        """Tell a rank what this one does, unless it has not received the last message yet."""
        with self._telling, suppress(Stopped):
            sender = self._senders[peer]
            if sender.settled():
                sender.give(_message(_LABEL, *label))

    def _listen(self, peer: int) -> None:
        """Hear another rank until its last word, then see to it that its end is noticed."""
        address = self._wires.address("liveness", peer, partial(self.broken, peer))
        receiver = Receiver(address)
        try:
            why = self._heard_until_last(peer, receiver)
        except Stopped:
            why = self._died(peer)
        self._has_heard(peer)  # that rank needs no last word any more
        if why is not None:
            self.fail(why, told_by=peer)
            return
        with self._changed:
            self._monitor.forget(peer)
        self._check_not_needed(peer)
        # If gloo sends a message while the connection breaks, the message may get lost, and the
        # wait for it never ends. So a message that is pending for too long counts as lost.
        while not self._monitor.ended.wait(GRACE):
            if not self._wires.pending(peer):
                continue
            ended = self._monitor.ended.wait(GRACE)
            if not ended and self._wires.pending(peer):
                self.broken(peer, RuntimeError("a message to it was not received"))
                return

    def _heard_until_last(self, peer: int, receiver: Receiver) -> str | None:
        """Hear a rank until its last word, and answer that; return the failure, if it tells one."""
        while True:
            message = receiver.take()
            what, *told = unpacked(message.tensors[0])
            if what == _LABEL:
                self._monitor.heard(peer, Label(*told))
            elif what == _HEARD:
                self._has_heard(peer)
            else:
                break
        with self._telling, suppress(Stopped):
            self._senders[peer].give_last(_message(_HEARD))
        why: str | None = told[0]
        return why

    def _died(self, peer: int) -> str:
        """Say that the connection to a rank has broken without a last word."""
        if pause := self._monitor.pause():
            return (
                f"rank {self._own} did not run for {pause:.1f} s (was its process stopped?), so "
                "others have ended"
            )
        return (
            f"rank {peer} has closed its connections and given no reason: has its process ended?"
            f"{self._monitor.last(peer)} ({self._lost[peer]})"
        )

    def _has_heard(self, peer: int) -> None:
        """Note that a rank has heard this rank's last word, or does not need it."""
        with self._changed:
            self._answered.add(peer)
            self._changed.notify_all()


def _message(*told: Any) -> Message:
    return Message(0, None, (packed(told),))
