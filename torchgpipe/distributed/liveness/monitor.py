"""The monitor of a rank: every second, or more often, it tells all others what this one does, and hears what they do.

It ends the pipeline where nothing else would, when one of these has lasted for `timeout` seconds:

    silence   nothing has come from a rank: its process is stopped, or the network is cut
    a hang    this rank's own task has neither ended nor computed
    a circle  all ranks wait, and none has got any further: one has left out a call

A rank that is outside of the pipeline, or whose task computes, may take as long as it likes. Time in which the monitor
itself did not run, such as between Ctrl-Z and `fg`, does not count.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from torchgpipe.distributed.liveness.idle import Idle, place
from torchgpipe.engine.program import Program
from torchgpipe.tensors._autograd import sharded

_TALK = 0.001
"""CPU seconds per second that hearing and telling one other rank may take; about twice what was seen."""


class Label(NamedTuple):
    """What a rank does, in words, whether it waits for others, and how many calls it has begun."""

    calls: int
    waits: bool
    words: str


class Activity:
    """What this rank does now: a call in which it may wait for other ranks, or something outside of the pipeline.

    `fail` is called with a line that says what is wrong. `beside` are those of all pipelines that this process has over
    the same ranks, this one included. `hears`: whether the call waits for a rank apart from its program's links.
    """

    def __init__(self, fail: Callable[[str], None], beside: list[Activity]) -> None:
        self.fail, self.beside = fail, beside
        beside.append(self)
        self._calls = self._serial = 0
        self._name: str | None = None
        self.program: Program | None = None
        self.hears, self.thread = False, 0

    @contextmanager
    def call(self, serial: int, name: str, program: Program | None) -> Iterator[None]:
        """Enter a call for a mini-batch."""
        self._calls, self._serial, self._name = self._calls + 1, serial, name
        self.program, self.hears, self.thread = program, False, threading.get_ident()
        try:
            yield
        finally:
            self._name = self.program = None

    @property
    def doing(self) -> str:
        """What this rank does now, or did last in its call."""
        if self._name is None:
            return f"outside of the pipeline{f', after mini-batch {self._serial}' if self._serial else ''}"
        program = self.program  # read once: the call may end meanwhile, in another thread
        return f"in {self._name if program is None else program.doing}"

    @property
    def computing(self) -> tuple[int, str] | None:
        """The task that is computed, which is another one in each call; `None` if there is none."""
        program = self.program
        computing = None if program is None else program.computing
        return (
            None
            if computing is None
            else (self._calls, f"{computing} of mini-batch {self._serial}")
        )

    def label(self) -> Label:
        """Return all this for other ranks: a call of another pipeline, if this one is in none."""
        calls = sum(each._calls for each in [*self.beside])
        within = [each for each in (self, *self.beside) if each._name is not None]
        if not within:
            return Label(calls, False, self.doing)
        first = within[0]
        waits = all(
            each.hears or (each.program is not None and each.computing is None) for each in within
        )
        which = f"of mini-batch {first._serial}{' of another pipeline' * (first is not self)}"
        return Label(calls, waits, f"{'waiting for other ranks ' * waits}{first.doing} {which}")


class RankMonitor:
    """Monitor all ranks for rank `own`, in a thread, until it is `ended` or something is wrong.

    With a `timeout` of `None` nothing is wrong for it. `tell` sends this rank's label to another one, and does not
    wait. What is wrong ends all pipelines that this process has over these ranks: it may wait in any of them. Of
    `others`, those that have ended are left out.
    """

    def __init__(
        self,
        own: int,
        others: Collection[int],
        activity: Activity,
        timeout: float | None,
        tell: Callable[[int, Label], None],
    ) -> None:
        self._own, self._activity, self._tell = own, activity, tell
        self._timeout = inf if timeout is None else timeout
        self._interval = min(
            0.5, self._timeout / 8
        )  # between looks; every second time it tells others
        self._looked = time.monotonic()
        self._paused = 0.0, 0.0  # for how long it was stopped last, and until when
        self._late = 0.0  # seconds in which this thread should have looked, and did not run
        # Nothing is known of a rank that has not told anything yet: it may still be connecting.
        self._heard: dict[int, tuple[float, Label]] = {}
        self.others = self._all = frozenset(others)
        self._idle = Idle(_TALK * len(others))
        self._labels: dict[int, Label] = {}
        self._unchanged_since = 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpipe-monitor", daemon=True)
        self.thread.start()

    def heard(self, peer: int, label: Label) -> None:
        """Note what has come from another rank."""
        self._heard[peer] = self._now(), label

    def forget(self, peer: int) -> None:
        """Expect nothing more from a rank, which has ended."""
        self.others -= {peer}
        self._heard.pop(peer, None)

    def answers(self, peer: int) -> bool:
        """Return whether a rank that is told something now can be expected to answer."""
        heard, _ = self._heard.get(peer, (inf, None))
        return self._now() - heard < 6 * self._interval

    def last(self, peer: int) -> str:
        """Return what a rank did when it was last heard of, and how long ago that was, if it was heard of."""
        if peer not in self._heard:
            return ""
        heard, label = self._heard[peer]
        return f" {self._now() - heard:.1f} s before, it was {label.words}"

    def pause(self) -> float:
        """Return for how many seconds this process did not run just now, or 0: others may have reported it."""
        late, (paused, until) = self._overdue(), self._paused
        if late >= self._timeout / 2:
            return late
        return paused if time.monotonic() - until < self._timeout else 0.0

    def _now(self) -> float:
        return time.monotonic() - self._late

    def _overdue(self) -> float:
        return max(0.0, time.monotonic() - self._looked - self._interval)

    def _run(self) -> None:
        wrong, count = None, 0
        try:
            while wrong is None and not self.ended.wait(self._interval * (count > 0)):
                wrong, count = self._look(tells=count % 2 == 0), count + 1
        except (
            BaseException
        ) as error:  # without its labels, others would take this rank for a silent one
            self._activity.fail(
                f"the monitor of rank {self._own} failed: {type(error).__name__}: {error}"
            )
            raise
        for each in [*self._activity.beside] if wrong else ():
            each.fail(str(wrong))

    def _look(self, *, tells: bool) -> str | None:
        late, self._looked = self._overdue(), time.monotonic()
        self._late += late
        if late > self._timeout / 2:
            self._paused = late, self._looked
        label = self._activity.label()
        for peer in self.others if tells else ():
            self._tell(peer, label)
        return self._silent() or self._hang() or self._circle(label)

    def _silent(self) -> str | None:
        now, heard = self._now(), self._heard.copy()
        if all(now - at < self._timeout for at, _ in heard.values()):
            return None
        # Several may have been cut off at once.
        begin = now - self._timeout + 3 * self._interval
        silent = {peer: label for peer, (at, label) in heard.items() if at < begin}
        one = len(silent) == 1
        return (
            f"{_named([*silent])} {'has' if one else 'have'} given no sign of life for {self._timeout:g} s: "
            f"{'is its process' if one else 'are their processes'} stopped, or is the network cut? "
            f"When last heard of, {_each(silent)}"
        )

    def _hang(self) -> str | None:
        task, program = self._activity.computing, self._activity.program
        idle = self._idle.look(task, self._now())
        if idle < self._timeout or task is None or program is None:
            return None
        if sharded(stage.partition for stage in program.stages.values()):
            return (
                None  # sharded layers may wait for a rank of another pipeline, which is only slow
            )
        return (
            f"rank {self._own} hangs in {task[1]}: for {self._timeout:g} s it has neither ended nor used the "
            f"CPU, in {place(self._activity.thread)}"
        )

    def _circle(self, own: Label) -> str | None:
        labels = {self._own: own} | {peer: label for peer, (_, label) in self._heard.copy().items()}
        waits = len(labels) > len(self.others) and all(label.waits for label in labels.values())
        if labels != self._labels or not waits:
            self._labels, self._unchanged_since = labels, self._now()
        if self._now() - self._unchanged_since < self._timeout:
            return None
        gone = self._all - self.others
        return (
            f"all ranks wait for each other, and none has got any further for {self._timeout:g} s: {_each(labels)}"
            f"{f'; {_named(gone)} had ended' if gone else ''}. "
            "Has a rank left out a call of the pipeline, or a backward()?"
        )


def _each(labels: dict[int, Label]) -> str:
    """Say what each rank was doing, together for those that did the same."""
    ranks = defaultdict(list)
    for rank, label in sorted(labels.items()):
        ranks[label.words].append(rank)
    return "; ".join(
        f"{_named(same)} {'was' if len(same) == 1 else 'were'} {words}"
        for words, same in ranks.items()
    )


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
