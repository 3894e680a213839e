"""Timelines: when the tasks of a step start and end. The times are simulated or measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from torchgpipe.schedules.action import Action, Kind

ROUNDING = 1e-12
"""A smaller fraction of the devices' time is an error of rounding, and counts as zero."""

Seconds = Callable[[Action], float]
"""Returns how many seconds an action takes."""

Copies = Iterable[tuple[int, int, float]]
"""Copies between devices, each as a source stage, a later target stage, and seconds.

The seconds are the time to copy one activation to the target, or its gradient back to the source.
"""


def units(action: Action) -> float:
    """Return an action's width in pictures of schedules: 2 for an unsplit backward, otherwise 1."""
    return 2 if action.kind == "backward" else 1


class Event(NamedTuple):
    """A forward, recomputation, backward or copy of a micro-batch, with its start and end.

    Times are in seconds since the step, or the recording of several steps, began.
    """

    kind: Kind
    micro_batch: int
    partition: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of one step, with simulated or measured times.

    A copy between devices does not count as work of a device.

    Attributes:
        events: The tasks. If times are simulated, each task is listed after the tasks it needs.
        seconds: How long the step takes.
        partitions: The number of devices. The timeline has a row for each.
        placement: The device of each stage. It is empty if each device has one stage.
        loss: For how many seconds the last stage's device computes one loss of the whole
            mini-batch, between the tasks. These seconds count as work.
    """

    events: list[Event]
    seconds: float
    partitions: int
    placement: Sequence[int] = ()
    loss: float = 0.0

    def __repr__(self) -> str:
        tasks = len(self.tasks)
        return f"Timeline: {tasks} tasks on {self.partitions} devices, {self.seconds:.3g} s"

    def row(self, event: Event) -> int:
        """Return the row of an event."""
        return self.placement[event.partition] if self.placement else event.partition

    @cached_property
    def tasks(self) -> list[Event]:
        """All events except copies."""
        return [event for event in self.events if event.kind != "copy"]

    @cached_property
    def devices(self) -> list[list[Event]]:
        """The tasks of each device."""
        devices: list[list[Event]] = [[] for _ in range(self.partitions)]
        for task in self.tasks:
            devices[self.row(task)].append(task)
        return devices

    @property
    def order(self) -> list[Action]:
        """All actions, sorted by the time when they start."""
        tasks = sorted(self.tasks, key=attrgetter("start"))
        return [Action(*task[:3]) for task in tasks]

    @property
    def window(self) -> tuple[float, float]:
        """The time when the first task starts, and the time when the last task ends.

        The step itself can end later, because the optimizer's step follows the last task.
        """
        tasks = self.tasks
        if not tasks:
            return 0.0, 0.0
        first = min(tasks, key=attrgetter("start"))
        last = max(tasks, key=attrgetter("end"))
        return first.start, last.end

    def busy(self, partition: int) -> float:
        """Return the number of seconds for which a device works."""
        last = self.placement[-1] if self.placement else self.partitions - 1
        return _worked(self.devices[partition]) + (self.loss if partition == last else 0.0)

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time, from 0 to 1, in which they wait.

        The time counts from the start of the first task to the end of the last task.
        """
        start, end = self.window
        if end <= start:
            return 0.0
        available = self.partitions * (end - start)
        waited = 1 - (_worked(self.tasks) + self.loss) / available
        return waited if waited > ROUNDING else 0.0

    @property
    def bubble_of_longest(self) -> float:
        """The fraction of time, from 0 to 1, in which a device waits between its own tasks.

        The device is the one with the longest time from its first task to its last task.
        """
        longest, worked = 0.0, 0.0
        for tasks in self.devices:
            span = tasks[-1].end - tasks[0].start
            if span > longest:
                longest, worked = span, _worked(tasks)
        return 1 - worked / longest


def _worked(tasks: Iterable[Event]) -> float:
    """Return the sum of the tasks' durations in seconds."""
    return sum(task.end - task.start for task in tasks)
