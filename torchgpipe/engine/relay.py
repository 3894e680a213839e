"""A relay: the queues by which the programs of all devices exchange tensors.

A program runs the tasks of one device, in its own thread. If one program fails, all programs stop.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
from queue import SimpleQueue
from typing import Any

from torchgpipe.engine.program import Links
from torchgpipe.schedules import Action
from torchgpipe.skip.layout import Crossing

_STOP = object()


class Stopped(Exception):
    """The exception that ends the work of a device or rank because another one has failed."""


class Relay(Links):
    """The queues by which devices exchange tensors, and the first exception of any device.

    Each device has a program, which runs the tasks of the device in a mini-batch.

    Args:
        placement: For each stage, the index of the program that runs it.
        forward: For which directions to make queues. `True` stands for activations, which go
            forward, and `False` for gradients, which go back.
    """

    def __init__(self, placement: Sequence[int], forward: Iterable[bool]) -> None:
        # Between two stages, each direction has room for one item. So each direction has two
        # queues: one for the item, and one for a ticket. To put in an item, a program must take
        # the only ticket. The program that takes the item puts the ticket back. (Two `SimpleQueue`s
        # are much faster than one `Queue` with a limit.) A key of the dictionary has the direction
        # and the later one of the two stages.
        between = [s for s in range(1, len(placement)) if placement[s - 1] != placement[s]]
        self._ends: dict[tuple[bool, int], tuple[SimpleQueue[Any], SimpleQueue[Any]]] = {}
        for way, s in product(forward, between):
            tickets: SimpleQueue[Any] = SimpleQueue()
            tickets.put(None)
            self._ends[way, s] = SimpleQueue(), tickets
        self._skips: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self.stopped = False
        self.running: list[threading.Lock] = []
        self.error: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Let all devices stop after their current tasks; keep `error` if it is the first one."""
        with self._lock:
            if not self.stopped:
                self.stopped, self.error = True, error
        # Do this even if `stopped` is set: Ctrl-C may have ended an earlier call of `stop` here.
        for queue in chain(*self._ends.values()):
            queue.put(_STOP)

    def starts(self, end: threading.Lock) -> bool:
        """Record that a device begins its tasks; return `False` if an error has stopped the run.

        `end` is a lock that will be released when the device has ended its tasks.
        """
        with self._lock:
            if not self.stopped:
                self.running.append(end)
            return not self.stopped

    def attempt(self, program: Callable[[], None]) -> None:
        """Run the tasks of a device; if they raise an exception, stop all other devices."""
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

    def give_skip(self, action: Action, crossing: Crossing, skip: Any) -> None:
        self._skips[action.kind == "forward", action.micro_batch, crossing] = skip

    def take_skip(self, action: Action, crossing: Crossing) -> Any:
        # No need to wait: the skip was left before the item that this program has already taken.
        return self._skips.pop((action.kind == "forward", action.micro_batch, crossing))


def _get(queue: SimpleQueue[Any]) -> Any:
    item = queue.get()
    if item is _STOP:
        raise Stopped
    return item
