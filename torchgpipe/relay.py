"""A relay: programs run at once, one per partition, each handing items to the next; one fails, all stop."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

_STOP = object()


class Stopped(Exception):
    """End a program because another one has failed."""


class Relay:
    """Link `length` programs in a row, and remember the first exception of any of them.

    A program gets at most `LEAD` items ahead of the next one: results that nobody needs yet only fill memory. For each
    item the giving program calls `admit` and `give`, the taking one calls `take`. The giver may call `announce` in
    between; then the taker calls `expect` before `take`. Once a program has failed, every call that waits raises
    `Stopped`.
    """

    LEAD = 1

    def __init__(self, length: int) -> None:
        self._links: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(length - 1)]
        # A ticket for each item that may be on its way. Two simple queues are much quicker than one with a limit.
        self._tickets: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(length - 1)]
        for tickets in self._tickets:
            for _ in range(self.LEAD):
                tickets.put(None)
        self._lock = threading.Lock()
        self.stopped = False
        self.error: BaseException | None = None

    def admit(self, position: int) -> None:
        """Wait until the program after `position` is not too far behind for another item."""
        _get(self._tickets[position])

    def announce(self, position: int) -> None:
        """Let the program after `position` know that its next item is being made."""
        self._links[position].put(None)

    def give(self, position: int, item: object) -> None:
        """Hand an item from the program at `position` to the next."""
        self._links[position].put(item)

    def expect(self, position: int) -> None:
        """Wait until the program before `position` announces its next item."""
        _get(self._links[position - 1])

    def take(self, position: int) -> Any:
        """Wait for the next item from the program before `position`."""
        item = _get(self._links[position - 1])
        self._tickets[position - 1].put(None)
        return item

    def check(self) -> None:
        """Raise `Stopped` if a program has failed; call before each task, so that none starts after that."""
        if self.stopped:
            raise Stopped

    def stop(self, error: BaseException) -> None:
        """Stop every program as soon as its present task is over; the first error is the one that counts."""
        with self._lock:
            if not self.stopped:
                self.stopped, self.error = True, error
        # Also if stopped already: Ctrl-C may have ended an earlier `stop` halfway.
        for queue in (*self._links, *self._tickets):
            queue.put(_STOP)

    def attempt(self, program: Callable[[], None]) -> None:
        """Run a program; an exception of it stops the others."""
        try:
            program()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)


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
