"""The threads that run programs, one for each partition but the last."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue

from torchgpipe.engine.relay import Relay

_running: contextvars.ContextVar[tuple[Workers, ...]] = contextvars.ContextVar("running", default=())
"""The workers whose programs the code that looks at it is part of."""


class Workers:
    """Threads that wait for programs; `count` of them, started when first needed.

    A program meets the context variables (`contextvars`) of the thread that calls `run`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
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
            with closing(Workers(self._count)) as again:
                return again.run(relay, programs)
        # In a context of the programs' own: what an interrupt could leave behind in the caller's would stay there.
        context = contextvars.copy_context()
        context.run(_running.set, (*_running.get(), self))
        try:
            self._run_all(relay, [partial(context.copy().run, program) for program in programs])
            if relay.error is not None:
                raise relay.error
        finally:
            # Break the cycle: the error's traceback refers to this frame, and the frame to the error.
            relay.error = None
            if self._closed:
                with self._lock:
                    self._end()

    def _run_all(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run the programs to their ends; a first interrupt lets each end after its present task."""
        *others, own = programs
        given: list[threading.Lock] = []
        try:
            # Two threads may run a mini-batch each. The lock lets all workers get the two in one order.
            with self._lock:
                self._start()
                for inbox, program in zip(self._inboxes, others, strict=True):
                    given.append(_give(inbox, partial(relay.attempt, program)))
            relay.attempt(own)
            _wait(given)
        except KeyboardInterrupt as interrupt:
            if isinstance(relay.error, KeyboardInterrupt):
                raise
            relay.stop(interrupt)
            _wait(given)

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
            # Not alive is also one that has failed to start.
            if thread is None or not thread.is_alive():
                self._threads[j] = new = threading.Thread(
                    target=_serve, args=(self._inboxes[j],), name=f"gpipe-partition-{j}", daemon=True
                )
                new.start()

    def _end(self) -> None:
        for j, thread in enumerate(self._threads):
            if thread is not None and thread.ident is not None:
                self._inboxes[j].put(None)
            self._threads[j] = None


Inbox = SimpleQueue[Callable[[], None] | None]


def _give(inbox: Inbox, program: Callable[[], None]) -> threading.Lock:
    """Give a program to the worker that serves `inbox`; return a lock that is taken until the program has ended."""
    running = threading.Lock()
    running.acquire(blocking=False)

    def run() -> None:
        try:
            program()
        finally:
            running.release()

    inbox.put(run)
    return running


def _wait(given: Sequence[threading.Lock]) -> None:
    # Each is free again after that, so that this can be called once more where Ctrl-C has ended it.
    for running in given:
        with running:
            pass


def _serve(inbox: Inbox) -> None:
    # Refers to nothing but its inbox, so that a waiting thread keeps no pipeline alive.
    while True:
        program = inbox.get()
        if program is None:
            return
        program()
        del program
