"""Replay a schedule: when each task starts and ends, given how long each takes. No torch in here.

The rules are the pipeline's own (GPipe paper, section 2.3; torchgpipe paper, section 3.2). A partition does one task
at a time. Forward takes micro-batches in order, backward in reverse. A task's input has to be there:

- forward (i, j) after forward (i, j - 1), and the copy between them;
- recomputation (i, j) as soon as its partition is free, also before its gradient arrives, unless told otherwise; CPU
  workers start it somewhat later, for memory, which costs no time where partitions are balanced (workers.py);
- backward (i, j) after its recomputation, backward (i, j + 1), and the copy between them.

Skips are copied straight from the partition that stashes them to the one that pops them, and their gradients back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchgpipe.tensors.observe import Kind

Table = Sequence[Sequence[float]]


class Event(NamedTuple):
    """A task, with its start and end in seconds since the step began."""

    kind: Kind
    micro_batch: int
    partition: int
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Seconds of every task, as tables [micro-batch][partition] of one shape.

    `recompute` is zero where a task is not checkpointed. `copy` is what passing a boundary takes, one way: one number
    for all boundaries, or one for each. `skips` says the same of skips, by the partitions that stash and pop them.
    With streams of their own, copies delay the receiver but occupy nobody; `blocking` ones occupy both sides, and
    start when both are free. `loss` lies between forward and backward. Without `ahead`, recomputation waits for its
    task's gradient.
    """

    forward: Table
    backward: Table
    recompute: Table
    copy: float | Sequence[float] = 0.0
    loss: float = 0.0
    skips: Mapping[tuple[int, int], float] = field(default_factory=dict)
    blocking: bool = False
    ahead: bool = True

    @property
    def total(self) -> float:
        """Seconds that one device would need for all tasks, one after another."""
        return sum(sum(row) for table in (self.forward, self.backward, self.recompute) for row in table)


@dataclass(frozen=True)
class Timeline:
    """The tasks of a step that takes so many seconds, replayed or measured; copies occupy no partition."""

    events: list[Event]
    seconds: float
    partitions: int

    @property
    def tasks(self) -> list[Event]:
        """What computes."""
        return [event for event in self.events if event.kind != "copy"]

    @property
    def window(self) -> tuple[float, float]:
        """The time from the first task's start to the last one's end: a measured step goes on for its optimizer."""
        tasks = self.tasks
        return (min(task.start for task in tasks), max(task.end for task in tasks)) if tasks else (0.0, 0.0)

    def busy(self, partition: int) -> float:
        """Return the seconds during which a partition works."""
        return sum(task.end - task.start for task in self.tasks if task.partition == partition)

    @property
    def bubble(self) -> float:
        """The share of the devices' time, from the first task to the last, in which they wait, from 0 to 1."""
        start, end = self.window
        if end <= start:
            return 0.0
        return max(0.0, 1 - sum(task.end - task.start for task in self.tasks) / (self.partitions * (end - start)))


def bubbles(steps: Sequence[Timeline]) -> list[float]:
    """Return the share of each partition's time in which it waits, from 0 to 1.

    Only time within steps counts, each from its first task to its last on any partition.
    """
    seconds = sum(end - start for start, end in (step.window for step in steps))
    if not seconds:
        return []
    busy = [sum(step.busy(j) for step in steps) for j in range(steps[0].partitions)]
    return [max(0.0, 1 - each / seconds) for each in busy]


def replay(costs: Costs) -> Timeline:
    """Return the timeline of one step: forward, then loss, then backward with recomputation.

    Recomputation starts at the earliest with backward, after the loss: that is when it is asked for.
    """
    m, n = len(costs.forward), len(costs.forward[0])
    copies = [costs.copy] * (n - 1) if isinstance(costs.copy, (int, float)) else list(costs.copy)
    # Where each partition sends to in forward, and (the gradients) in backward, the next one first.
    down: list[list[tuple[int, float]]] = [[(j + 1, copies[j])] if j < n - 1 else [] for j in range(n)]
    up: list[list[tuple[int, float]]] = [[(j - 1, copies[j - 1])] if j > 0 else [] for j in range(n)]
    for (source, target), seconds in costs.skips.items():
        down[source].append((target, seconds))
        up[target].append((source, seconds))

    forward: list[tuple[Kind, int, int]] = [("forward", i, j) for i in range(m) for j in range(n)]
    backward: list[tuple[Kind, int, int]] = [
        (kind, i, j) for _, i, j in reversed(forward) for kind in ("recompute", "backward")
    ]
    events: list[Event] = []
    begin, free, blocking = 0.0, [0.0] * n, costs.blocking
    for tasks, targets in ((forward, down), (backward, up)):
        if events:
            begin = (max(free) if blocking else free[n - 1]) + costs.loss
            free = [begin] * n
        arrival = [[begin] * n for _ in range(m)]
        for kind, i, j in tasks:
            seconds, again = getattr(costs, kind)[i][j], kind == "recompute"
            if again and not seconds:
                continue
            start = free[j] if again and costs.ahead else max(free[j], arrival[i][j])
            free[j] = end = start + seconds
            events.append(Event(kind, i, j, start, end))
            for target, seconds in () if again else targets[j]:
                there = end + seconds
                if blocking and seconds:
                    there = max(free[j], free[target]) + seconds
                    free[j] = free[target] = there
                arrival[i][target] = max(arrival[i][target], there)
    return Timeline(events, max(free), n)


def shared(timeline: Timeline, sharing: float) -> Timeline:
    """Return the timeline where every device at work makes the others' tasks take longer, by `sharing` of their time.

    All tasks that run at the same moment are slowed down alike, so time itself is stretched there.
    """
    changes: dict[float, int] = {}
    for task in timeline.tasks:
        changes[task.start] = changes.get(task.start, 0) + 1
        changes[task.end] = changes.get(task.end, 0) - 1
    stretched: dict[float, float] = {}
    now = before = 0.0
    busy = 0
    for time in sorted(changes):
        now += (time - before) * (1 + sharing * max(0, busy - 1))
        stretched[time], before = now, time
        busy += changes[time]
    events = [event._replace(start=stretched[event.start], end=stretched[event.end]) for event in timeline.tasks]
    return Timeline(events, now + timeline.seconds - before, timeline.partitions)
