"""Timelines: when the tasks of a step start and end, in a replay or as measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchgpipe.schedules.action import Action, Kind

Seconds = Callable[[Action], float]
Copies = Iterable[tuple[int, int, float]]
"""Seconds in which what one stage makes for a later one gets to its device, and the gradient comes back."""


def units(action: Action) -> float:
    """Return how long an action takes in pictures and closed forms: a whole backward two units, all others one."""
    return 1 + (action.kind == "backward")


class Event(NamedTuple):
    """A task: an action or a copy, and its start and end in seconds since the step began."""

    kind: Kind
    micro_batch: int
    partition: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of a step that takes so many seconds, replayed or measured; copies occupy no device.

    `partitions` are rows, one for each device; `placement` says in which each stage is, where some have several. In a
    replay, no event is before one that it needs.
    """

    events: list[Event]
    seconds: float
    partitions: int
    placement: Sequence[int] = ()

    def row(self, event: Event) -> int:
        """Return the row of an event."""
        return self.placement[event.partition] if self.placement else event.partition

    @cached_property
    def tasks(self) -> list[Event]:
        """What computes."""
        return [event for event in self.events if event.kind != "copy"]

    @cached_property
    def devices(self) -> list[list[Event]]:
        """What computes, by device."""
        devices: list[list[Event]] = [[] for _ in range(self.partitions)]
        for task in self.tasks:
            devices[self.row(task)].append(task)
        return devices

    @property
    def order(self) -> list[Action]:
        """All actions as they start. One thread can do them for all devices in this order."""
        return [Action(*task[:3]) for task in sorted(self.tasks, key=lambda task: task.start)]

    @property
    def window(self) -> tuple[float, float]:
        """The time from the first task's start to the last one's end: a measured step goes on for its optimizer."""
        tasks = self.tasks
        return (
            (min(task.start for task in tasks), max(task.end for task in tasks))
            if tasks
            else (0.0, 0.0)
        )

    def busy(self, partition: int) -> float:
        """Return the seconds during which a partition works."""
        return sum(task.end - task.start for task in self.devices[partition])

    @property
    def bubble(self) -> float:
        """The share of the devices' time, from the first task to the last, in which they wait, from 0 to 1."""
        start, end = self.window
        if end <= start:
            return 0.0
        return max(
            0.0,
            1
            - sum(task.end - task.start for task in self.tasks) / (self.partitions * (end - start)),
        )

    @property
    def bubble_of_longest(self) -> float:
        """The share of its own span, first task to last, in which the device with the longest one waits."""
        spans = [own[-1].end - own[0].start for own in self.devices]
        return 1 - self.busy(spans.index(max(spans))) / max(spans)
