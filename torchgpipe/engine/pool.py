"""The worker threads of a pipeline: one for each device except the last one."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue

from torchgpipe.engine.relay import Relay
from torchgpipe.task.guards.modes import RUNNING

IN_A_TASK = (
    "a layer, or a hook of a layer, calls the pipeline in the middle of a task; call it after the "
    "step, or in the criterion, or use engine='graph'"
)
SHARDED = (
    "layers that FSDP shards (fully_shard) call collectives, which all ranks must call in the same "
    "order, but worker threads have no fixed order; use engine='graph'"
)


class Workers:
    """A pool of `count` threads, which start when they are first needed.

    A pipeline keeps one pool as long as it lives. In each run, every thread gets a program: a
    function that runs the tasks of one device. `run` handles these special cases:

    - This process was forked, so the threads only exist in the parent process.
    - A layer or a hook runs the same pipeline again, while all its threads are busy.
    - The caller has set context variables (`contextvars`), which the programs have to see.
    - The user interrupts the run (Ctrl-C), so all programs have to stop.
    - The pipeline is closed (`close`) in the middle of a run.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread | None] = [None] * count
        self._lock = threading.Lock()
        self._closed = False
        # The relay of the current run, or of an interrupted run.
        self._relay: Relay | None = None
        self._by = 0  # the thread that has started this run

    def run(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run each program in a thread, the last one in the calling thread; wait for all of them.

        A program runs the tasks of one device. If a program raises an exception, all programs stop,
        and the first exception is raised again. After Ctrl-C, each program stops after its current
        task. After a second Ctrl-C, the caller does not wait for the programs.
        """
        if os.getpid() != self._process:
            # Make everything anew. Another thread may have held the lock when the process forked.
            Workers.__init__(self, self._count)
        if self in RUNNING.get():
            with closing(Workers(self._count)) as others:
                return others.run(relay, programs)
        try:
            # Set the variable `RUNNING` in a copy of the caller's context variables. So even after
            # an interrupt, the variable is not set for the caller.
            context = contextvars.copy_context()
            context.run(RUNNING.set, (*RUNNING.get(), self))
            self._relay, self._by = relay, threading.get_ident()
            self._run_all(relay, [partial(context.copy().run, program) for program in programs])
            self._relay = None
            if relay.error is not None:
                raise relay.error
        finally:
            # The error's traceback refers to this frame, which refers to the relay: a cycle.
            relay.error = None
            if self._closed:
                with self._lock:
                    self._end()

    def _run_all(self, relay: Relay, programs: Sequence[Callable[[], None]]) -> None:
        """Run the programs of all devices; Ctrl-C stops each of them after its current task."""
        *others, own = programs
        ends: list[threading.Lock] = []
        try:
            # Two user threads can run two mini-batches at the same time. With the lock, all worker
            # threads get the programs of the two mini-batches in the same order.
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
        """Return whether no thread runs tasks any more, after the user pressed Ctrl-C in a run."""
        return self._relay is None or not any(end.locked() for end in self._relay.running)

    def wait(self) -> None:
        """Wait until no thread runs tasks any more, after the user pressed Ctrl-C in a run."""
        # After a fork, there are no threads to wait for. Another thread's run is not interrupted.
        own = self._by == threading.get_ident() and os.getpid() == self._process
        if self._relay is not None and own:
            self._relay.stop(KeyboardInterrupt())
            _wait(self._relay.running)
            self._relay = None

    def close(self) -> None:
        """End each thread when it has run the tasks that it was given.

        The user can keep an output for longer than the pipeline. If the output's backward runs
        later, it starts the threads again, and ends them afterwards.
        """
        self._closed = True
        # The garbage collector may call this method in the middle of a run, when the lock is taken.
        # Do not wait for the lock in this case, because the run itself will end the threads.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _start(self) -> None:
        for j, thread in enumerate(self._threads):
            # Besides threads that have ended, this finds threads that have failed to start.
            if thread is None or not thread.is_alive():
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
    """Let a worker thread run a program: the tasks of one device.

    Return a lock that is released when the program has ended.
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
    """Wait until the tasks of all devices have ended.

    The list `ends` has a lock for each device. The lock is released when the device's tasks have
    ended, and is then removed from `ends`. So if Ctrl-C ends this wait, another call can wait for
    the remaining locks.
    """
    while ends:
        with ends[-1]:
            ends.pop()


def _serve(inbox: Inbox) -> None:
    """Call the functions that are put into a worker thread's inbox, until `None` is put into it.

    A waiting thread refers only to its inbox, so that it keeps no other object alive.
    """
    while (program := inbox.get()) is not None:
        program()
        del program
