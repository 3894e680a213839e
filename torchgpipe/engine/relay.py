"""A relay: programs run at once, one per partition, and each hands items to the next. If one fails, all stop."""

import threading
from collections.abc import Callable
from itertools import chain, pairwise
from queue import SimpleQueue
from typing import Any

from torchgpipe.engine.program import Links
from torchgpipe.skip.layout import Crossing

_STOP = object()


class Stopped(Exception):
    """End a program because another one has failed."""


class Relay:
    """Link `length` programs in a row by queues, and remember the first exception of any of them.

    A program gets at most one item ahead of the next one: results that nobody needs yet only fill memory. Once a
    program has failed, every call that waits raises `Stopped`.
    """

    def __init__(self, length: int) -> None:
        # Whoever gives an item takes a ticket before, and whoever takes the item puts it back. Two simple queues are
        # much quicker than one with a limit.
        self._ends: list[End] = [(SimpleQueue(), SimpleQueue()) for _ in range(length - 1)]
        for _, tickets in self._ends:
            tickets.put(None)
        self._lock = threading.Lock()
        self.stopped = False
        self.error: BaseException | None = None

    def links(self) -> list[Links]:
        """Return each program's links, in their order. They refer to the relay: it keeps none, or that were a cycle."""
        left: dict[tuple[int, Crossing], Any] = {}
        return [Queues(self, a, z, left) for a, z in pairwise([NO_END, *self._ends, NO_END])]

    def stop(self, error: BaseException) -> None:
        """Stop every program as soon as its present task is over; the first error is the one that counts."""
        with self._lock:
            if not self.stopped:
                self.stopped, self.error = True, error
        # Also if stopped already: Ctrl-C may have ended an earlier `stop` halfway.
        for queue in chain(*self._ends):
            queue.put(_STOP)

    def attempt(self, program: Callable[[], None]) -> None:
        """Run a program; an exception of it stops the others."""
        try:
            program()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)


End = tuple[SimpleQueue[Any], SimpleQueue[Any]]
"""The queue of items between two programs, and that of tickets."""

NO_END: End = (SimpleQueue(), SimpleQueue())
"""In place of the queues before the first program and after the last, which these two never use."""


class Queues(Links):
    """The links of one program in a relay; see `torchgpipe.engine.program.Links`."""

    def __init__(self, relay: Relay, before: End, after: End, left: dict[tuple[int, Crossing], Any]) -> None:
        self._relay = relay
        self._before, self._returned = before
        self._after, self._tickets = after
        self._left = left

    def check(self) -> None:
        if self._relay.stopped:
            raise Stopped

    def admit(self) -> None:
        _get(self._tickets)

    def announce(self) -> None:
        self._after.put(None)

    def give(self, item: Any) -> None:
        self._after.put(item)

    def expect(self) -> None:
        _get(self._before)

    def take(self) -> Any:
        item = _get(self._before)
        self._returned.put(None)
        return item

    def leave(self, i: int, crossing: Crossing, skip: Any) -> None:
        self._left[i, crossing] = skip

    def fetch(self, i: int, crossing: Crossing) -> Any:
        # Whoever left it did so before handing on the micro-batch that this program has taken.
        return self._left.pop((i, crossing))


def _get(queue: SimpleQueue[Any]) -> Any:
    item = queue.get()
    if item is _STOP:
        raise Stopped
    return item
