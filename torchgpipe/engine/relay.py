"""A relay: programs run at once, one for each device, and hand items to each other.

If one program fails, all stop.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any

from torchgpipe.engine.program import Links
from torchgpipe.schedules import Action
from torchgpipe.skip.layout import Crossing

_STOP = object()


class Stopped(Exception):
    """End a program because another one has failed."""


class Relay(Links):
    """Link all programs of a mini-batch by queues, and remember the first exception of any of them.

    `placement` says which program has each stage; items go `forward` (`True`), gradients back, or
    both. Between programs, a boundary has room for one item each way, so that items are taken in
    the order in which they are given.
    """

    def __init__(self, placement: Sequence[int], forward: Iterable[bool]) -> None:
        # Whoever gives an item takes a ticket before, and whoever takes the item puts it back. Two
        # simple queues are much quicker than one with a limit. Stages after a boundary: there
        # forwards take, and backwards give.
        between = [s for s in range(1, len(placement)) if placement[s - 1] != placement[s]]
        self._ends: dict[tuple[bool, int], tuple[SimpleQueue[Any], SimpleQueue[Any]]] = {
            (way, s): (SimpleQueue(), SimpleQueue()) for way in forward for s in between
        }
        for _, tickets in self._ends.values():
            tickets.put(None)
        self._left: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self.stopped = False
        self.running: list[threading.Lock] = []
        self.error: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Stop every program as soon as its present task is over; the first error counts."""
        with self._lock:
            if not self.stopped:
                self.stopped, self.error = True, error
        # Also if stopped already: Ctrl-C may have ended an earlier `stop` halfway.
        for queue in chain(*self._ends.values()):
            queue.put(_STOP)

    def starts(self, end: threading.Lock) -> bool:
        """Note a program that begins, by a lock that is free when the program has ended.

        Return `False` if it must not begin.
        """
        with self._lock:
            if not self.stopped:
                self.running.append(end)
            return not self.stopped

    def attempt(self, program: Callable[[], None]) -> None:
        """Run a program; an exception of it stops the others."""
        try:
            program()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)

    def check(self) -> None:
        if self.stopped:
            raise Stopped

    def take(self, action: Action) -> Any:
        forward = action.kind == "forward"
        items, tickets = self._ends[forward, action.stage + (not forward)]
        item = _get(items)
        tickets.put(None)
        return item

    def give(self, action: Action, item: Any) -> None:
        forward = action.kind == "forward"
        items, tickets = self._ends[forward, action.stage + forward]
        _get(tickets)
        items.put(item)

    def leave(self, action: Action, crossing: Crossing, skip: Any) -> None:
        self._left[action.kind == "forward", action.micro_batch, crossing] = skip

    def fetch(self, action: Action, crossing: Crossing) -> Any:
        # Whoever left it did so before handing on the micro-batch that this program has taken.
        return self._left.pop((action.kind == "forward", action.micro_batch, crossing))


def _get(queue: SimpleQueue[Any]) -> Any:
    item = queue.get()
    if item is _STOP:
        raise Stopped
    return item
