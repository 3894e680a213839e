"""Messages by which each rank learns whether another rank works, has ended or has failed.

Every rank regularly tells all other ranks what it does now (monitor.py). When a rank ends, it sends
a final message, which says that the rank has ended normally, or why the pipeline has failed. Then
the rank waits for at most a second until other ranks have received the final message, and
disconnects. So if a connection breaks without a final message, the other process has died.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from torchgpipe.distributed.channels.channel import ChannelAddress
from torchgpipe.distributed.channels.message import Message
from torchgpipe.distributed.channels.receiver import Receiver
from torchgpipe.distributed.channels.sender import Sender
from torchgpipe.distributed.liveness.monitor import Activity, Label, RankMonitor
from torchgpipe.engine.relay import Stopped
from torchgpipe.plain import packed, unpacked

END_SECONDS = 1.0
"""How many seconds a rank waits for one thing while its connections end.

A rank waits at most this long for other ranks to receive its final message, and for its own threads
to end. A message to a rank that has ended counts as lost after this time. A rank waits up to twice
as long for its last messages to be received, and for other ranks to be told of a failure.
"""

_LABEL, _ANSWER, _LAST = range(3)
"""The kinds of messages: what a rank does now; an answer to a final message; a final message."""

Broken = Callable[[BaseException], None]
"""A function that is called with the error of gloo when a connection breaks."""


EQUALLY_OFTEN = (
    "every rank has to call the pipeline, and then backward(), equally often and in the same "
    "order; the same holds for clip_grad_norm_(), for save() and load() of Saves, and for record()"
)


class RankFailed(RuntimeError):
    """Raised if another rank has failed. The message names the rank, and quotes its error."""


def gist(error: BaseException) -> str:
    """Return gloo's error message without its source location and its list of possible causes."""
    sentence, _, _ = str(error).partition(". ")
    _, _, what = sentence.rpartition("] ")
    return what


class Channels(Protocol):
    """The methods of `Connections` that `Liveness` uses."""

    def address(self, kind: str, peer: int, broken: Broken) -> ChannelAddress:
        """Return the address of a channel to or from another rank.

        Args:
            kind: The kind of the channel, such as `"liveness"`.
            peer: The other rank.
            broken: Called with gloo's error if the connection breaks.
        """

    def pending(self, peer: int) -> bool:
        """Return whether the rank `peer` still has to receive messages of this rank."""

    def disconnect(self) -> None:
        """Break all connections of this rank, so that no thread waits for other ranks any more."""


class Liveness:
    """Tell all other ranks what this rank does, and receive what all other ranks do.

    For each other rank, there is a channel to the rank, a channel from the rank, and a thread that
    receives the rank's messages.

    Args:
        own: This rank.
        others: All other ranks.
        timeout: How many seconds a problem may last (monitor.py); `None` for no limit.
        channels: The connections of this rank, from which it gets the addresses of channels.
        beside: The activities of other pipelines that this process runs over the same ranks. This
            pipeline's `activity` is added to the list.

    Attributes:
        activity: What this rank does now.
        stopped: Whether any rank has failed.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        timeout: float | None,
        channels: Channels,
        beside: list[Activity],
    ) -> None:
        self._own = own
        self._channels = channels
        self.stopped = False
        # The first failure of any rank. It is stored as text, because an exception keeps the frames
        # of its traceback alive.
        self._failure = ""
        self._told = threading.Event()  # set when other ranks have been told of the failure
        self._changed = threading.Condition()
        # For each broken connection, the other rank and gloo's error.
        self._lost: dict[int, str] = {}
        # The ranks that have received this rank's final message, or that have ended.
        self._answered: set[int] = set()
        self._senders: dict[int, Sender] = {}
        for peer in others:
            # Ignore errors of this sender. If the connection is broken, the thread that listens to
            # the other rank finds out why.
            address = channels.address("liveness", peer, lambda error: None)
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
        """Return the error for the user, which says why the pipeline was stopped."""
        self._told.wait(2 * END_SECONDS)
        return RankFailed(self._failure or f"rank {self._own} has closed its connections")

    def fail(self, why: str, told_by: int | None = None) -> None:
        """Tell all other ranks that a rank has failed, and end all waits of this rank.

        Only the first failure counts.

        Args:
            why: A line of text that names the failed rank and its error.
            told_by: The rank from which this rank has heard of the failure; `None` if it found the
                failure itself.
        """
        with self._changed:
            if self.stopped or self._monitor.ended.is_set():
                return  # a connection that breaks after this rank has closed it is not a failure
            self._failure = why
            self.stopped = True
        self.tell_last(why, told_by)
        self._told.set()
        self._channels.disconnect()

    def tell_last(self, why: str | None = None, told_by: int | None = None) -> None:
        """Send this rank's final message, and wait until other ranks have received it.

        Wait for at most a second. If the connection was closed without this wait, the message could
        be lost.

        Args:
            why: The failure, or `None` if this rank has ended without a failure.
            told_by: The rank from which this rank has heard of the failure. It gets no message.
        """
        told = self._monitor.others - {told_by}
        for peer in told:
            self._tell(peer, _LAST, why)
        awaited = {peer for peer in told if self._monitor.answers(peer)}
        with self._changed:
            self._changed.wait_for(lambda: awaited <= self._answered, END_SECONDS)

    def broken(self, peer: int, error: BaseException) -> None:
        """Record that the connection to the rank `peer` broke while it was in use."""
        with self._changed:
            self._lost[peer] = gist(error)
        self._check_not_needed(peer)

    def close(self) -> list[threading.Thread]:
        """Break all connections, and return this pipeline's threads, which are about to end.

        If a rank has failed, wait first until other ranks have been told of the failure.
        """
        if self.stopped:
            self._told.wait(2 * END_SECONDS)
        self._monitor.ended.set()
        self._channels.disconnect()
        beside = self.activity.beside
        beside[:] = [each for each in beside if each is not self.activity]
        threads = list(self._threads)
        for sender in self._senders.values():
            sender.stop()
            threads.append(sender.thread)
        threads.append(self._monitor.thread)
        return threads

    def _check_not_needed(self, peer: int) -> None:
        """Call `fail` if the rank `peer` has ended normally, but this process still needed `peer`.

        This process still needed `peer` if the connection to `peer` broke while it was in use.
        """
        with self._changed:
            has_ended = peer not in self._monitor.others
            why = self._lost.get(peer) if has_ended else None
        if why is not None:
            self.fail(
                f"rank {peer} has ended, or called close(), but rank {self._own} needs more from "
                f"it: {EQUALLY_OFTEN} ({why})"
            )

    def _tell(self, peer: int, *told: Any) -> None:
        """Send a message to a rank; do nothing if this rank has disconnected."""
        with self._telling, suppress(Stopped):
            self._senders[peer].give(_message(*told))

    def _tell_label(self, peer: int, label: Label) -> None:
        """Tell a rank what this rank is doing, unless an earlier message is still under way."""
        with self._telling, suppress(Stopped):
            sender = self._senders[peer]
            if sender.settled():
                sender.give(_message(_LABEL, *label))

    def _listen(self, peer: int) -> None:
        """Receive all messages of another rank, and react when that rank ends or fails."""
        address = self._channels.address("liveness", peer, partial(self.broken, peer))
        receiver = Receiver(address)
        try:
            why = self._heard_until_last(peer, receiver)
        except Stopped:
            why = self._died(peer)
        self._note_answer(peer)  # the other rank has ended, and needs no final message of this rank
        if why is not None:
            self.fail(why, told_by=peer)
            return
        with self._changed:
            self._monitor.forget(peer)
        self._check_not_needed(peer)
        # If the connection breaks while gloo sends a message, gloo may wait for ever. So a message
        # to the ended rank counts as lost if it has not been received after a while.
        while not self._monitor.ended.wait(END_SECONDS):
            if not self._channels.pending(peer):
                continue
            ended = self._monitor.ended.wait(END_SECONDS)
            if not ended and self._channels.pending(peer):
                self.broken(peer, RuntimeError("a message to it was not received"))
                return

    def _heard_until_last(self, peer: int, receiver: Receiver) -> str | None:
        """Receive a rank's messages up to its final message, and confirm the final message.

        Returns:
            The failure in the final message, or `None` if the rank has ended without a failure.
        """
        while True:
            message = receiver.take()
            what, *told = unpacked(message.tensors[0])
            if what == _LABEL:
                self._monitor.heard(peer, Label(*told))
            elif what == _ANSWER:
                self._note_answer(peer)
            else:
                break
        with self._telling, suppress(Stopped):
            self._senders[peer].give_last(_message(_ANSWER))
        why: str | None = told[0]
        return why

    def _died(self, peer: int) -> str:
        """Return an error text for a rank whose connection broke without a final message."""
        if pause := self._monitor.pause():
            return (
                f"rank {self._own} did not run for {pause:.1f} s (was its process stopped?), so "
                "others have ended"
            )
        return (
            f"rank {peer} has closed its connections and given no reason: has its process ended?"
            f"{self._monitor.last(peer)} ({self._lost[peer]})"
        )

    def _note_answer(self, peer: int) -> None:
        """Record that a rank has received this rank's final message, or has ended."""
        with self._changed:
            self._answered.add(peer)
            self._changed.notify_all()


def _message(*told: Any) -> Message:
    return Message(0, None, (packed(told),))
