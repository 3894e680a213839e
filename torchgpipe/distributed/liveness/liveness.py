"""What a rank says to all others besides the pipeline's messages: what it does, again and again, and its last word.

A rank that has ended says so. One that ends because of a failure says why: its own error, or what it was told. Only
when others have heard that, it closes its connections, which ends all that waits in this process. So where a connection
closes without a last word, a process has died.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from torchgpipe.distributed.liveness.monitor import Activity, Label, RankMonitor
from torchgpipe.distributed.wires.wire import Message, Receiver, Sender, WireAddress
from torchgpipe.engine.relay import Stopped

GRACE = 1.0
"""Seconds in which other ranks have to hear a last word."""

_BEAT, _HEARD, _PARTED, _FAILED = range(4)
"""What a word is: what a rank does now; that a last word was heard; and the last word of a rank."""

Broken = Callable[[BaseException], None]


class RankFailed(RuntimeError):
    """Another rank has failed; the message names it, and has its error."""


def gist(error: BaseException) -> str:
    """Return of gloo's words what has happened, without where in its source, and what that may come from."""
    return str(error).partition(". ")[0].rpartition("] ")[2]


class Liveness:
    """Say words to all other ranks, and hear theirs; find the first failure of any rank.

    Each other rank has a wire both ways, by `address`, and a thread that listens to it. A rank fails, too, if it gives
    no sign of life for `silence` seconds; with `None` nobody looks at that. `disconnect` closes all connections.

    Attributes:
        activity: what this rank does.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        address: Callable[[int, Broken], WireAddress],
        silence: float | None,
        disconnect: Callable[[], None],
    ) -> None:
        self._own, self._others, self._disconnect = own, others, disconnect
        self._disconnected = False
        # A text, since an error would keep the frames that it has come through alive.
        self._error: str | None = None
        self._told = threading.Event()  # others have heard of the error
        self._gone: set[int] = set()  # ranks that have parted
        self._lost: dict[int, str] = {}  # what gloo said when the connection to a rank broke
        self._answered: set[int] = set()  # ranks that have heard this one's last word, or said their own
        self._changed = threading.Condition()
        # A word that does not arrive is no failure: who listens to that rank hears why.
        self._senders = {peer: Sender(address(peer, lambda error: None)) for peer in others}
        self._speaking = threading.RLock()
        self.activity = Activity()
        self._watch = RankMonitor(own, others, self.activity, silence, self._beat, self.fail)
        self._threads = [
            threading.Thread(target=self._listen, args=(peer, address), name=f"gpipe-listens-to-{peer}", daemon=True)
            for peer in others
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stopped(self) -> bool:
        """Whether some rank has failed."""
        return self._error is not None

    def failure(self) -> BaseException:
        """Return why programs were stopped."""
        self._told.wait(2 * GRACE)
        return RankFailed(self._error or f"rank {self._own} has closed its connections")

    def fail(self, why: str, told_by: int | None = None) -> None:
        """Tell all other ranks that a rank has failed, and end all waits of this one. The first failure counts."""
        with self._changed:
            if self.stopped or self._disconnected:
                return
            self._error = why
        self._say(_FAILED, why, told_by)
        self._told.set()
        self.disconnect()

    def disconnect(self) -> None:
        """Close all connections, and so end all waits of this rank. What breaks from now on is no failure."""
        self._disconnected = True
        self._disconnect()

    def part(self) -> None:
        """Tell all other ranks that this one has ended."""
        self._say(_PARTED)

    def broken(self, peer: int, error: BaseException) -> None:
        """Note that a connection has broken that was needed. Who listens to its rank finds out why."""
        line = gist(error)
        with self._changed:
            self._lost[peer] = line
            parted = peer in self._gone
        if parted:
            self.fail(
                f"rank {peer} has ended, or called close(), but rank {self._own} needs more from it: every rank has to "
                f"call the pipeline, and then backward(), equally often ({line})"
            )

    def close(self) -> list[threading.Thread]:
        """Close all connections, once others have heard of a failure; return threads that are about to end."""
        if self.stopped:
            self._told.wait(2 * GRACE)
        self.disconnect()
        self._watch.stop()
        for sender in self._senders.values():
            sender.stop()
        return [*self._threads, *(sender.thread for sender in self._senders.values()), self._watch.thread]

    def _say(self, kind: int, said: str | None = None, told_by: int | None = None) -> None:
        """Give all other ranks a last word, and wait until they have it: closing a connection may lose what is sent."""
        awaited = {*self._others} - self._gone - {told_by}
        for peer in awaited:
            self._send(peer, Message(0, (kind, said), ()))
        awaited = {peer for peer in awaited if self._watch.answers(peer)}
        with self._changed:
            self._changed.wait_for(lambda: awaited <= self._answered, GRACE)

    def _beat(self, peer: int, label: Label) -> None:
        """Tell a rank what this one does, unless what it was told last has not arrived yet."""
        with self._speaking, suppress(Stopped):
            if self._senders[peer].settled():
                self._send(peer, Message(0, (_BEAT, None), (label.packed(),)))

    def _send(self, peer: int, word: Message) -> None:
        with self._speaking, suppress(Stopped):
            self._senders[peer].give(word)

    def _listen(self, peer: int, address: Callable[[int, Broken], WireAddress]) -> None:
        """Hear what another rank does, until its last word."""
        try:
            receiver = Receiver(address(peer, partial(self.broken, peer)))
            while (word := receiver.take()).about[0] in (_BEAT, _HEARD):
                if word.about[0] == _BEAT:
                    self._watch.heard(peer, Label.unpacked(word.tensors[0]))
                else:
                    self._has_heard(peer)
        except Stopped:
            self._has_heard(peer)
            self.fail(self._died(peer))
            return
        kind, said = word.about
        with self._speaking, suppress(Stopped):
            self._senders[peer].give_last(Message(0, (_HEARD, None), ()))
        self._has_heard(peer)  # it needs no last word any more
        if kind == _FAILED:
            self.fail(said, told_by=peer)
            return
        self._watch.forget(peer)
        with self._changed:
            self._gone.add(peer)
            lost = self._lost.get(peer)
        if lost is not None:
            self.broken(peer, RuntimeError(lost))

    def _died(self, peer: int) -> str:
        if pause := self._watch.pause():
            return f"rank {self._own} did not run for {pause:.1f} s (was its process stopped?), so others have ended"
        why = "has closed its connections and given no reason: has its process ended?"
        return f"rank {peer} {why}{self._watch.last(peer)} ({self._lost[peer]})"

    def _has_heard(self, peer: int) -> None:
        with self._changed:
            self._answered.add(peer)
            self._changed.notify_all()
