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

_running: contextvars.ContextVar[tuple[Workers, ...]] = contextvars.ContextVar(
    "running", default=()
)
"""The workers that run the present code.

There are several where a pipeline is among the layers of another pipeline.
"""


class Workers:
    """Threads that run programs; `count` of them, started when first needed.

    A pipeline has one such object for as long as it lives. So `run` has to do with more than its
    threads:

    - a fork, which leaves the threads behind in the parent process;
    - a layer or hook that runs the same pipeline again, while all of its threads are busy;
    - context variables (`contextvars`), which programs shall find as the caller has them;
    - an interrupt (Ctrl-C), after which no program may run on;
    - the end of the pipeline (`close`), which can come in the middle of a run.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread | None] = [None] * count
        self._lock = threading.Lock()
        self._closed = False
        self._relay: Relay | None = (
            None  # of the present run, or of one that an interrupt has ended
        )

    def run(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run one program in each thread, and the last in the caller's; return when all have ended.

        Raises the first exception of any program, with its own traceback. After an interrupt,
        programs stop when their present tasks are over; a second interrupt does not wait for that.
        """
        if os.getpid() != self._process:
            Workers.__init__(
                self, self._count
            )  # the lock, too: another thread may have held it at the fork
        if self in _running.get():
            with closing(Workers(self._count)) as others:
                return others.run(relay, programs)
        try:
            # In copies of the caller's context, where an interrupt can leave nothing behind.
            context = contextvars.copy_context()
            context.run(_running.set, (*_running.get(), self))
            self._relay = relay
            self._run_all(relay, [partial(context.copy().run, program) for program in programs])
            self._relay = None
            if relay.error is not None:
                raise relay.error
        finally:
            relay.error = (
                None  # its traceback refers to this frame, which refers to the relay: a cycle
            )
            if self._closed:
                with self._lock:
                    self._end()

    def _run_all(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run the programs to their ends; a first interrupt ends each after its present task."""
        *others, own = programs
        ends: list[threading.Lock] = []
        try:
            # If two threads run a mini-batch each, all workers have to get the two in the same
            # order.
            with self._lock:
                self._start()
                for inbox, program in zip(self._inboxes, others, strict=True):
                    ends.append(_give(inbox, relay, program))
            relay.attempt(own)
            _wait(ends)
        except KeyboardInterrupt as interrupt:
            if isinstance(relay.error, KeyboardInterrupt):
                raise
            relay.stop(interrupt)
            _wait(relay.running)

    def is_over(self) -> bool:
        """Return whether no program of a run that an interrupt has ended still runs."""
        return self._relay is None or not any(end.locked() for end in self._relay.running)

    def wait(self) -> None:
        """Wait until no program of a run that an interrupt has ended still runs."""
        # A fork has no threads that it could wait for.
        if self._relay is not None and os.getpid() == self._process:
            self._relay.stop(KeyboardInterrupt())
            _wait(self._relay.running)
            self._relay = None

    def close(self) -> None:
        """End the threads when their present programs have ended.

        A later run starts them again, and ends them itself: an output can outlive the pipeline, and
        then go backward.
        """
        self._closed = True
        # This may be called during a run, even in its thread, as the pipeline is collected. Then
        # that run ends them.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _start(self) -> None:
        for j, thread in enumerate(self._threads):
            if (
                thread is None or not thread.is_alive()
            ):  # one that failed to start is not alive either
                self._threads[j] = new = threading.Thread(
                    target=_serve,
                    args=(self._inboxes[j],),
                    name=f"gpipe-partition-{j}",
                    daemon=True,
                )
                new.start()

    def _end(self) -> None:
        for j, thread in enumerate(self._threads):
            if thread is not None and thread.ident is not None:
                self._inboxes[j].put(None)
            self._threads[j] = None


Inbox = SimpleQueue[Callable[[], None] | None]


def _give(inbox: Inbox, relay: Relay, program: Callable[[], None]) -> threading.Lock:
    """Give a program to the worker that serves `inbox`.

    Return a lock that is free when the program has ended.
    """
    end = threading.Lock()
    end.acquire(blocking=False)

    def run() -> None:
        try:
            if relay.starts(end):
                relay.attempt(program)
        finally:
            end.release()

    inbox.put(run)
    return end


def _wait(ends: list[threading.Lock]) -> None:
    """Wait until the programs have ended.

    If an interrupt comes at any line, this may be called again for the rest.
    """
    while ends:
        with ends[-1]:
            ends.pop()


def _serve(inbox: Inbox) -> None:
    """Run the programs that come.

    The thread refers to its inbox only: while it waits, it keeps nothing alive.
    """
    while (program := inbox.get()) is not None:
        program()
        del program
