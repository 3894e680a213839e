"""A monitor thread: it tells other ranks what this rank does, and checks what other ranks do.

The monitor sends a message every second, or more often. It ends the pipeline if one of these
problems has lasted for `timeout` seconds. Without the monitor, they could last for ever:

    silence   no message has come from a rank: its process is stopped, or the network is cut
    hang      a task of this rank has not ended, and has not used the CPU
    circle    all ranks wait for each other: one of them has left out a call

A rank may compute, or be outside of the pipeline, for any time. Time in which the monitor itself
did not run, such as between Ctrl-Z and `fg`, does not count.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from math import inf
from typing import NamedTuple

import torch.distributed as dist

from torchgpipe.distributed.liveness.idle import Idle, place
from torchgpipe.engine.program import Program
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import sharded

_TALK = 0.001
"""CPU seconds per second for messages with one other rank; about twice the measured value."""


class Label(NamedTuple):
    """A description of what a rank does now.

    Attributes:
        calls: How many calls of pipelines the rank has begun.
        waits: Whether the rank waits for other ranks.
        words: What the rank does, as text for error messages.
    """

    calls: int
    waits: bool
    words: str


class Activity:
    """What this rank does now, within a call of its pipeline or outside of the pipeline.

    Args:
        fail: A function that ends the pipeline. It takes a line of text that says what is wrong.
        beside: A list with the `Activity` of each pipeline that this process has over the same
            ranks. This new `Activity` is added to the list.

    Attributes:
        program: The program (the rank's list of tasks) that the current call runs.
        hears: Whether the current call waits for a message of another rank, before the program
            starts or after it has ended.
        thread: The thread that made the last call.
    """

    def __init__(self, fail: Callable[[str], None], beside: list[Activity]) -> None:
        self.fail = fail
        self.beside = beside
        beside.append(self)
        self._calls = 0
        self._serial = 0
        self._name: str | None = None
        self.program: Program | None = None
        self.hears = False
        self.thread = 0

    @contextmanager
    def call(self, serial: int, name: str, program: Program | None) -> Iterator[None]:
        """Within this context, note that a call of the pipeline runs, so that other ranks are told.

        Args:
            serial: The number of the mini-batch.
            name: The name of the call in error messages.
            program: The program (the rank's list of tasks) that the call runs, or `None` if not yet
                known.
        """
        self._calls += 1
        self._serial = serial
        self._name = name
        self.program = program
        self.hears = False
        self.thread = threading.get_ident()
        try:
            yield
        finally:
            self._name = self.program = None

    @property
    def within(self) -> bool:
        """Whether a call of the pipeline is running."""
        return self._name is not None

    @property
    def doing(self) -> str:
        """What this rank does now, or what it did last in its call, as text for error messages."""
        if not self.within:
            after = f", after mini-batch {self._serial}" if self._serial else ""
            return f"outside of the pipeline{after}"
        program = self.program  # read only once, because another thread can end the call
        return f"in {self._name if program is None else program.doing}"

    @property
    def computing(self) -> tuple[int, str] | None:
        """The number of the current call, and its task as text; `None` if no task runs."""
        program = self.program
        computing = None if program is None else program.computing
        if computing is None:
            return None
        return self._calls, f"{computing} of mini-batch {self._serial}"

    def label(self) -> Label:
        """Return a description of what this rank does now, which is sent to other ranks.

        If no call of this pipeline is running, describe a call of another pipeline of this process.
        """
        calls = sum(each._calls for each in [*self.beside])
        within = [each for each in (self, *self.beside) if each.within]
        if not within:
            return Label(calls, False, self.doing)
        first = within[0]
        waits = all(each._waits() for each in within)
        words = f"{first.doing} of mini-batch {first._serial}"
        if first is not self:
            words += " of another pipeline"
        if waits:
            words = f"waiting for other ranks {words}"
        return Label(calls, waits, words)

    def _waits(self) -> bool:
        """Return whether the current call waits for another rank."""
        program = self.program
        return self.hears or (program is not None and program.computing is None)


class RankMonitor:
    """A thread that monitors all ranks, until `ended` is set or a problem is found.

    A process can have several pipelines over the same ranks, and can be waiting in any of them. So
    if there is a problem, all pipelines over these ranks end.

    Args:
        own: This rank.
        others: All other ranks.
        activity: What this rank does.
        timeout: How many seconds a rank may be silent, hang or wait before this is a problem;
            `None` for no limit.
        tell: A function that sends this rank's `Label` to another rank, and does not wait.

    Attributes:
        others: The other ranks that have not ended.
        ended: An event that ends the monitor.
        thread: The thread of the monitor.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        activity: Activity,
        timeout: float | None,
        tell: Callable[[int, Label], None],
    ) -> None:
        self._own = own
        self._activity = activity
        self._tell = tell
        self._timeout = inf if timeout is None else timeout
        # The monitor checks all ranks at this interval, and sends messages at every second check.
        self._interval = min(0.5, self._timeout / 8)
        self._looked = time.monotonic()
        # The last pause in which the process did not run: its seconds, and the time of its end.
        self._paused = 0.0, 0.0
        # How many seconds the checks were late in all, because this thread did not run.
        self._late = 0.0
        # The time of the last message from each rank, and what the rank did then (its label). A
        # rank has no entry until its first message, because it may still be connecting.
        self._heard: dict[int, tuple[float, Label]] = {}
        self._all = frozenset(others)
        self.others = self._all
        self._idle = Idle(_TALK * len(others))
        self._labels: dict[int, Label] = {}
        self._on_gpu = False  # whether this rank's latest program ran on a GPU
        self._unchanged_since = 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpipe-monitor", daemon=True)
        self.thread.start()

    def heard(self, peer: int, label: Label) -> None:
        """Record the label that another rank has sent: a description of what that rank does now."""
        self._heard[peer] = self._now(), label

    def forget(self, peer: int) -> None:
        """Stop monitoring a rank, because it has ended."""
        self.others -= {peer}
        self._heard.pop(peer, None)

    def answers(self, peer: int) -> bool:
        """Return whether a rank sent a message recently, so that it can be expected to answer."""
        last = self._heard.get(peer)
        if last is None:
            return True  # it may still be connecting
        heard, _ = last
        return self._now() - heard < 6 * self._interval

    def last(self, peer: int) -> str:
        """Return a text that says when a rank sent its last message, and what the rank did then.

        If no message has come from the rank, return "".
        """
        if peer not in self._heard:
            return ""
        heard, label = self._heard[peer]
        return f" {self._now() - heard:.1f} s before, it was {label.words}"

    def pause(self) -> float:
        """Return for how many seconds this process was recently stopped, for example by Ctrl-Z.

        Return 0 after short pauses. After a long pause, other ranks may already treat this process
        as failed.
        """
        late = self._overdue()
        if late >= self._timeout / 2:
            return late
        paused, until = self._paused
        return paused if time.monotonic() - until < self._timeout else 0.0

    def _now(self) -> float:
        """Return the time, in seconds, of a clock that stops while this thread cannot run."""
        return time.monotonic() - self._late

    def _overdue(self) -> float:
        """Return by how many seconds this thread is late for its next check."""
        since = time.monotonic() - self._looked
        return max(0.0, since - self._interval)

    def _run(self) -> None:
        wrong: str | None = None
        pause, tells = 0.0, True
        try:
            while wrong is None and not self.ended.wait(pause):
                wrong = self._look(tells=tells)
                pause, tells = self._interval, not tells
        except BaseException as error:
            # Tell other ranks the error. Otherwise they would only miss this rank's labels, and
            # report this rank as silent.
            why = f"{type(error).__name__}: {error}"
            self._activity.fail(f"the monitor of rank {self._own} failed: {why}")
            raise
        if wrong is not None:
            for each in [*self._activity.beside]:
                each.fail(wrong)

    def _look(self, *, tells: bool) -> str | None:
        """Check all ranks; return a line of text that says what is wrong, or `None` if nothing is.

        Args:
            tells: Whether to tell other ranks what this rank does now (its label).
        """
        late = self._overdue()
        self._looked = time.monotonic()
        self._late += late
        if late > self._timeout / 2:
            self._paused = late, self._looked
        label = self._activity.label()
        if tells:
            for peer in self.others:
                self._tell(peer, label)
        return self._silent() or self._hang() or self._circle(label)

    def _silent(self) -> str | None:
        now = self._now()
        heard = self._heard.copy()
        if all(now - at < self._timeout for at, _ in heard.values()):
            return None
        # Ranks that were cut off at the same time reach the timeout at slightly different times. So
        # the error message also names ranks that have almost reached the timeout.
        begin = now - self._timeout + 3 * self._interval
        silent = {peer: label for peer, (at, label) in heard.items() if at < begin}
        have, processes = "have", "are their processes"
        if len(silent) == 1:
            have, processes = "has", "is its process"
        return (
            f"{_named(silent)} {have} given no sign of life for {self._timeout:g} s: "
            f"{processes} stopped, or is the network cut? When last heard of, {_each(silent)}"
        )

    def _hang(self) -> str | None:
        task = self._activity.computing
        program = self._activity.program
        idle = self._idle.look(task, self._now())
        if idle < self._timeout or task is None or program is None:
            return None
        # Sharded layers may wait for a rank of another pipeline that is only slow.
        modules = [stage.modules for stage in program.stages.values()]
        if sharded(chain.from_iterable(modules)):
            return None
        _, words = task
        where = place(self._activity.thread)
        return (
            f"rank {self._own} hangs in {words}: for {self._timeout:g} s it has neither ended nor "
            f"used the CPU, in {where}"
        )

    def _circle(self, label: Label) -> str | None:
        labels = {self._own: label}
        for peer, (_, theirs) in self._heard.copy().items():
            labels[peer] = theirs
        all_known = len(labels) > len(self.others)
        waits = all_known and all(each.waits for each in labels.values())
        if labels != self._labels or not waits:
            self._labels = labels
            self._unchanged_since = self._now()
        if self._now() - self._unchanged_since < self._timeout or self._may_wait_for_replica():
            return None
        gone = self._all - self.others
        ended = f"; {_named(gone)} had ended" if gone else ""
        return (
            "all ranks wait for each other, and none has got any further for "
            f"{self._timeout:g} s: {_each(labels)}{ended}. Has a rank left out a call of the "
            "pipeline, or a backward()?"
        )

    def _may_wait_for_replica(self) -> bool:
        """Return whether a GPU of this pipeline may wait for another replica, which is only slow.

        Then all ranks of this pipeline wait for each other, but only until the other replica has
        caught up.
        """
        program = self._activity.program
        if program is not None:
            devices = [stage.device for stage in program.stages.values()]
            self._on_gpu = any(map(accelerator.has_streams, devices))
        return self._on_gpu and dist.get_world_size() > 1 + len(self._all)


def _each(labels: dict[int, Label]) -> str:
    """Return a text that says what each rank was doing; list ranks that did the same together."""
    ranks = defaultdict(list)
    for rank, label in sorted(labels.items()):
        ranks[label.words].append(rank)
    said = []
    for words, same in ranks.items():
        was = "was" if len(same) == 1 else "were"
        said.append(f"{_named(same)} {was} {words}")
    return "; ".join(said)


def _named(ranks: Collection[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
