"""Replay a schedule with what tasks and copies take: when each task starts and ends. No torch in here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torchgpipe.schedules import Kind, Schedule, make
from torchgpipe.schedules.replay import Event, Timeline

__all__ = ["Costs", "Event", "Timeline", "recomputing", "replay", "shared"]

Table = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Costs:
    """Seconds of every task, as tables [micro-batch][partition] of one shape.

    `recompute` is zero where a task is not checkpointed. `copy` is what passing a boundary takes, one way: one number
    for all boundaries, or one for each. `skips` says the same of skips, by the partitions that stash and pop them.
    With streams of their own, copies delay the receiver but occupy nobody; `blocking` ones occupy both sides, and
    start when both are free. `loss` lies between the last forward and all that is none; without it (None) a step does
    as the schedule says. Without `ahead`, recomputation waits for its task's gradient. `weights` is what of a backward
    can be done later, for the weights alone, in schedules with halves.
    """

    forward: Table
    backward: Table
    recompute: Table
    copy: float | Sequence[float] = 0.0
    loss: float | None = 0.0
    skips: Mapping[tuple[int, int], float] = field(default_factory=dict)
    blocking: bool = False
    ahead: bool = True
    weights: Table = ()


@lru_cache(maxsize=32)
def recomputing(schedule: str | Schedule, n: int, m: int, v: int | None = None) -> Schedule:
    """Return the schedule with a recomputation of every task: those that are not recomputed take no time."""
    return make(schedule, n, m, v, "always")


def replay(costs: Costs, schedule: Schedule | None = None) -> Timeline:
    """Return the timeline of one step as `schedule` has it, which is `recomputing`; by default, as GPipe's does."""
    n = len(costs.forward[0])
    schedule = schedule or recomputing("GPipe", n, len(costs.forward))
    copies = [costs.copy] * (n - 1) if isinstance(costs.copy, (int, float)) else costs.copy
    inputs = [
        [a - b for a, b in zip(*rows, strict=False)]
        for rows in zip(costs.backward, costs.weights, strict=False)
    ]
    tables: dict[Kind, Table] = {
        "forward": costs.forward,
        "recompute": costs.recompute,
        "backward": costs.backward,
        "backward_inputs": inputs,
        "backward_weights": costs.weights,
    }
    return schedule.replay(
        lambda action: tables[action[0]][action[1]][action[2]],
        [
            *((j, j + 1, x) for j, x in enumerate(copies)),
            *((*route, x) for route, x in costs.skips.items()),
        ],
        blocking=costs.blocking,
        ahead=costs.ahead,
        loss=costs.loss,
    )


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
    events = [
        event._replace(start=stretched[event.start], end=stretched[event.end])
        for event in timeline.tasks
    ]
    return replace(timeline, events=events, seconds=now + timeline.seconds - before)
