"""The threads that run programs, one for each partition but the last."""

from __future__ import annotations

import contextvars
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from torchgpipe.hang import Watch
from torchgpipe.observe import NOTHING
from torchgpipe.program import Program
from torchgpipe.relay import Relay

_running: contextvars.ContextVar[tuple[Within, ...]] = contextvars.ContextVar("running", default=())
"""The programs that the code that looks at it is part of, the outermost first."""

_numbers = itertools.count()


class Run:
    """Programs that run at once, linked by a relay, and which of them have ended, each number j in a thread.

    Attributes:
        number: another one for each run.
    """

    def __init__(self, relay: Relay, programs: Sequence[Program]) -> None:
        self.relay, self.programs = relay, programs
        self.number = next(_numbers)
        self._ended: set[int] = set()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._inner: set[tuple[int, Run]] = set()

    def attempt(self, j: int, call: Callable[[], None]) -> None:
        """Run program j in this thread, by `call`; an exception of it stops the others."""
        try:
            self.relay.attempt(call)
        finally:
            self.end(j)

    def end(self, j: int) -> None:
        """Note that program j has ended, or that nobody shall wait for it."""
        self._ended.add(j)
        self._wake.put(None)

    def has_ended(self, j: int) -> bool:
        """Return whether program j has ended."""
        return j in self._ended

    def tasks(self) -> list[tuple[int, int, str]]:
        """Return which tasks are computed now, each with this run's number and its program's."""
        now = [(self.number, j, program.computing) for j, program in enumerate(self.programs) if not self.has_ended(j)]
        return [(number, j, task) for number, j, task in now if task]

    def hangs(self) -> list[tuple[int, str]]:
        """Return those tasks, each with its program's number, that are to be given up if nothing is computed any more.

        The last program is none of them, since its thread is the caller's. Nor is a task with a pipeline among its
        layers that gives up one of its own.
        """
        inner = {j for j, run in self._inner.copy() if run.hangs()}
        return [(j, task) for _, j, task in self.tasks() if j + 1 < len(self.programs) and j not in inner]

    @contextmanager
    def within(self, outer: Within, silence: float) -> Iterator[None]:
        """Be part of another run's task, which is not given up as long as a task of this one hangs that can be.

        That is so only if this one's `silence` is not the longer one.
        """
        run, others = outer.run(), outer.workers.silence()
        if run is None or others is None or others < silence:
            yield
            return
        run._inner.add((outer.j, self))
        try:
            yield
        finally:
            run._inner.discard((outer.j, self))

    def wait(self, count: int) -> None:
        """Wait until so many programs have ended."""
        # Count them, not what `get` returned: Ctrl-C can come right after `get`.
        while len(self._ended) < count:
            self._wake.get()


class Within(NamedTuple):
    """What code is part of: program j of a run, which `workers` run."""

    workers: Workers
    run: weakref.ref[Run]  # code may keep its context variables
    j: int


class Workers:
    """Threads that wait for programs; `count` of them, started when first needed.

    A program meets the context variables (`contextvars`) of the thread that calls `run`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._process = os.getpid()
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread | None] = [None] * count
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(
        self,
        relay: Relay,
        calls: Sequence[Callable[[], None]],
        programs: Sequence[Program] = (),
        silence: float | None = None,
    ) -> None:
        """Run one program per worker and a last one in this thread, by `calls`; return when all have ended.

        With a `silence`, each of `programs` that is idle for so many seconds in a worker's task is given up.

        Raises the first exception of any program, with its own traceback. On an interrupt (Ctrl-C) the programs
        stop after their present tasks; a second interrupt does not wait for that.
        """
        if os.getpid() != self._process:
            # A fork leaves the threads behind, and whatever they held.
            Workers.__init__(self, self._count)
        outer = _running.get()
        if silence is None and outer:
            # This pipeline is a layer of another one. Its silence counts here, too: it could give up the layer only.
            silence = outer[-1].workers.silence()
        if any(each.workers is self for each in outer):
            # A layer or a hook of a program runs the pipeline again: these threads are busy until that returns.
            again = Workers(self._count)
            try:
                return again.run(relay, calls, programs, silence)
            finally:
                again.close()
        # In a context of the programs' own: what an interrupt could leave behind in the caller's would stay there.
        contexts = [contextvars.copy_context() for _ in calls]
        run = Run(relay, programs)
        for j, context in enumerate(contexts):
            context.run(_running.set, (*outer, Within(self, weakref.ref(run), j)))
        *others, own = map(partial, [context.run for context in contexts], calls)
        posted = 0
        try:
            try:
                # Two threads may run a mini-batch each. The lock lets all workers get the two in one order.
                with self._lock:
                    self._start(silence)
                    self._runs.add(run)
                    for j, call in enumerate(others):
                        self._inboxes[j].put(partial(run.attempt, j, call))
                        posted += 1
                with NOTHING if silence is None or not outer else run.within(outer[-1], silence):
                    relay.attempt(own)
                    run.wait(posted)
            except KeyboardInterrupt as interrupt:
                if isinstance(relay.error, KeyboardInterrupt):
                    raise
                relay.stop(interrupt)
                run.wait(posted)
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

    def silence(self) -> float | None:
        """Return after how many seconds an idle task is given up."""
        return None if self._watch is None else self._watch.silence

    def runs(self) -> list[Run]:
        """Return the runs under way."""
        with self._lock:
            return [*self._runs]

    def thread(self, j: int) -> threading.Thread | None:
        """Return the thread that runs programs j."""
        return self._threads[j]

    def replace(self, j: int) -> None:
        """Let another thread run programs j from now on; the present one ends after the program that it is in."""
        with self._lock:
            self._replace(j)

    def _replace(self, j: int) -> None:
        old, self._inboxes[j], self._threads[j] = self._inboxes[j], SimpleQueue(), None
        with suppress(Empty):
            while True:
                self._inboxes[j].put(old.get_nowait())
        old.put(None)
        if not self._inboxes[j].empty():
            self._start_thread(j)

    def _start(self, silence: float | None) -> None:
        for j, thread in enumerate(self._threads):
            # Not alive is also one that has failed to start.
            if thread is None or not thread.is_alive():
                self._start_thread(j)
        if self._watch is not None and self._watch.silence != silence:
            self._end_watch()
        if self._watch is None and silence is not None:
            self._watch = Watch(self, silence)

    def _start_thread(self, j: int) -> None:
        inbox = self._inboxes[j]
        self._threads[j] = new = threading.Thread(
            target=_serve, args=(inbox, partial(self._lost, j, inbox)), name=f"gpipe-partition-{j}", daemon=True
        )
        new.start()

    def _lost(self, j: int, inbox: Inbox, error: BaseException) -> None:
        """Let the runs fail that wait for thread j, which has served `inbox` and ends by an error."""
        with self._lock:
            if self._inboxes[j] is not inbox:
                return
            self._inboxes[j], self._threads[j] = SimpleQueue(), None
            waiting = [run for run in self._runs if not run.has_ended(j)]
        for run in waiting:
            run.relay.stop(error)
            run.end(j)

    def _end(self) -> None:
        for j, thread in enumerate(self._threads):
            if thread is not None and thread.ident is not None:
                self._inboxes[j].put(None)
            self._threads[j] = None
        self._end_watch()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._watch = None


Inbox = SimpleQueue[Callable[[], None] | None]


def _serve(inbox: Inbox, lost: Callable[[BaseException], None]) -> None:
    # Refers to no pipeline while it waits, or that would live as long.
    try:
        while True:
            program = inbox.get()
            if program is None:
                return
            program()
            del program
    except BaseException as error:
        # Somebody has raised it in this thread from outside, between two programs. The second one may be lost.
        lost(error)
