"""A relay: programs run at once, one per partition, each handing items to the next; one fails, all stop."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from torchgpipe.program import Links
from torchgpipe.skip.layout import Crossing

_STOP = object()


class Stopped(Exception):
    """End a program because another one has failed."""


class Relay:
    """Link `length` programs in a row by queues, and remember the first exception of any of them.

    A program gets at most `LEAD` items ahead of the next one: results that nobody needs yet only fill memory. Once a
    program has failed, every call that waits raises `Stopped`.

    Attributes:
        links: each program's, in their order.
    """

    LEAD = 1

    def __init__(self, length: int) -> None:
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(length - 1)]
        # A ticket for each item that may be on its way. Two simple queues are much quicker than one with a limit.
        self._tickets: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(length - 1)]
        for tickets in self._tickets:
            for _ in range(self.LEAD):
                tickets.put(None)
        left: dict[tuple[int, Crossing], Any] = {}
        ends = list(zip(self._queues, self._tickets, strict=True))
        self.links = [Queues(self, a, z, left) for a, z in zip([NO_END, *ends], [*ends, NO_END], strict=True)]
        self._lock = threading.Lock()
        self.stopped = False
        self.error: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Stop every program as soon as its present task is over; the first error is the one that counts."""
        with self._lock:
            if not self.stopped:
                self.stopped, self.error = True, error
        # Also if stopped already: Ctrl-C may have ended an earlier `stop` halfway.
        for queue in (*self._queues, *self._tickets):
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
"""In place of the queues before the first program and after the last, which these do not touch."""


class Queues(Links):
    """The links of one program in a relay; see `torchgpipe.program.Links`."""

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


_running: contextvars.ContextVar[tuple[Workers, ...]] = contextvars.ContextVar("running", default=())
"""The workers whose programs the code that looks at it is part of."""


class Workers:
    """Threads that wait for programs; `count` of them, started when first needed.

    A program meets the context variables (`contextvars`) of the thread that calls `run`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread | None] = [None] * count
        self._lock = threading.Lock()
        self._closed = False

    def run(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run one program per worker and a last one in this thread; return when all have ended.

        Raises the first exception of any program, with its own traceback. On an interrupt (Ctrl-C) the programs
        stop after their present tasks; a second interrupt does not wait for that.
        """
        if os.getpid() != self._process:
            # A fork leaves the threads behind, and whatever they held.
            Workers.__init__(self, self._count)
        if self in _running.get():
            # A layer or a hook of a program runs the pipeline again: these threads are busy until that returns.
            again = Workers(self._count)
            try:
                return again.run(relay, programs)
            finally:
                again.close()
        # In a context of the programs' own: what an interrupt could leave behind in the caller's would stay there.
        context = contextvars.copy_context()
        context.run(_running.set, (*_running.get(), self))
        *others, own = programs
        posted = 0
        ended: list[None] = []
        wake: SimpleQueue[None] = SimpleQueue()

        def finish(program: Callable[[], None]) -> None:
            try:
                relay.attempt(program)
            finally:
                ended.append(None)
                wake.put(None)

        def wait() -> None:
            # Count `ended`, not what `get` returned: Ctrl-C can come right after `get`.
            while len(ended) < posted:
                wake.get()

        try:
            try:
                # Two threads may run a mini-batch each. The lock lets all workers get the two in one order.
                with self._lock:
                    self._start()
                    for inbox, program in zip(self._inboxes, others, strict=True):
                        inbox.put(partial(finish, partial(context.copy().run, program)))
                        posted += 1
                relay.attempt(partial(context.run, own))
                wait()
            except KeyboardInterrupt as interrupt:
                if isinstance(relay.error, KeyboardInterrupt):
                    raise
                relay.stop(interrupt)
                wait()
            if relay.error is not None:
                raise relay.error
        finally:
            # Break the cycle: the error's traceback refers to this frame, and the frame to the error.
            relay.error = None
            if self._closed:
                with self._lock:
                    self._end()

    def close(self) -> None:
        """End the threads when their present programs have ended.

        A later run, by the backward of an output that outlives the pipeline, starts them again and then ends them.
        """
        self._closed = True
        # The pipeline may be collected in any thread, also during a run. That run ends the threads itself.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _start(self) -> None:
        for j, thread in enumerate(self._threads):
            # A thread without ident has failed to start.
            if thread is None or thread.ident is None:
                self._threads[j] = new = threading.Thread(
                    target=_serve, args=(self._inboxes[j],), name=f"gpipe-partition-{j}", daemon=True
                )
                new.start()

    def _end(self) -> None:
        for j, thread in enumerate(self._threads):
            if thread is not None and thread.ident is not None:
                self._inboxes[j].put(None)
            self._threads[j] = None


def _get(queue: SimpleQueue[Any]) -> Any:
    item = queue.get()
    if item is _STOP:
        raise Stopped
    return item


def _serve(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    # Refers to nothing but its inbox, so that a waiting thread keeps no pipeline alive.
    while True:
        program = inbox.get()
        if program is None:
            return
        program()
        del program
