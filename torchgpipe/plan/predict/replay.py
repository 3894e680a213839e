"""Compute when each task of a schedule starts and ends, from the seconds of tasks and copies.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from torchgpipe.schedules import Kind, Schedule, make
from torchgpipe.schedules.action import Action
from torchgpipe.schedules.replay import Event, Timeline

__all__ = ["Costs", "Event", "Timeline", "recomputing", "replay", "shared"]

Table = Sequence[Sequence[float]]
"""Seconds for each micro-batch and stage: `table[micro_batch][stage]`."""


@dataclass(frozen=True)
class Costs:
    """The seconds of every task and every copy in a training step.

    The seconds of tasks are in tables; `table[i][s]` is for micro-batch i on stage s.

    Attributes:
        forward: Seconds of each forward.
        backward: Seconds of each whole backward.
        recompute: Seconds of each recomputation: zero if the task is not checkpointed.
        copy: Seconds of copying an output to the next stage, or its gradient back: one number, or a
            list with a number for each stage but the last.
        loss: Seconds of computing the loss, if a single loss is computed between the last forward
            and all other actions. `None` if there is no such loss.
        skips: Seconds of copying skips. The keys are pairs: the stage that stashes, and the stage
            that pops.
        blocking: Whether a copy keeps both the sending and the receiving device from running tasks.
            It then starts when both are free. If false, copies run on separate streams, and only
            the receiving device waits for them.
        ahead: Whether a recomputation may run before the gradient of its task's output arrives.
        weights: Seconds of the part of each backward that computes only the weights' gradients.
            Schedules that split backwards into two halves need these seconds.
        issue: For each kind of task, a table of the seconds in which the host launches the task's
            kernels. One thread does this for all devices (see `Schedule.replay`). `None` if it
            takes no time.
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
    issue: Mapping[Kind, Table] | None = None


@lru_cache(maxsize=32)
def recomputing(schedule: str | Schedule, n: int, m: int, v: int | None = None) -> Schedule:
    """Return a schedule in which every task is recomputed before its backward.

    The schedule can be replayed for all checkpoint modes, because in a replay the recomputation of
    a task that is not checkpointed takes no time.

    Args:
        schedule: The name of a schedule, or the schedule itself.
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has, if the schedule does not decide this.
    """
    return make(schedule, n, m, v, "always")


def replay(costs: Costs, schedule: Schedule | None = None) -> Timeline:
    """Return the timeline of one training step, which tells when each task starts and ends.

    Args:
        costs: The seconds of every task and copy.
        schedule: A schedule that the function `recomputing` has returned; by default GPipe's.
    """
    n = len(costs.forward[0])
    schedule = schedule or recomputing("GPipe", n, len(costs.forward))
    inputs: list[list[float]] = []
    for backward, weights in zip(costs.backward, costs.weights, strict=False):
        inputs.append([whole - half for whole, half in zip(backward, weights, strict=False)])
    tables: dict[Kind, Table] = {
        "forward": costs.forward,
        "recompute": costs.recompute,
        "backward": costs.backward,
        "backward_inputs": inputs,
        "backward_weights": costs.weights,
    }

    seconds = partial(_looked_up, tables)
    issue = None if costs.issue is None else partial(_looked_up, costs.issue)
    boundaries = costs.copy
    if isinstance(boundaries, (int, float)):
        boundaries = [boundaries] * (n - 1)
    copies = [(stage, stage + 1, delay) for stage, delay in enumerate(boundaries)]
    for (source, target), delay in costs.skips.items():
        copies.append((source, target, delay))
    return schedule.replay(
        seconds,
        copies,
        blocking=costs.blocking,
        ahead=costs.ahead,
        loss=costs.loss,
        issue=issue,
    )


def _looked_up(tables: Mapping[Kind, Table], action: Action) -> float:
    """Return the seconds of an action, from the table for actions of its kind."""
    kind, micro_batch, stage = action
    return tables[kind][micro_batch][stage]


def shared(timeline: Timeline, sharing: float) -> Timeline:
    """Stretch a timeline, because devices slow each other down, as CPU devices do.

    Each period of time in which k devices work at once takes 1 + sharing * (k - 1) times as long.

    Args:
        timeline: The timeline for devices that do not slow each other down.
        sharing: How much longer a task takes for each other device that works meanwhile, as a share
            of the time that the task takes alone. For example, 0.1 means 10 % longer.
    """
    changes: dict[float, int] = {}
    for task in timeline.tasks:
        changes[task.start] = changes.get(task.start, 0) + 1
        changes[task.end] = changes.get(task.end, 0) - 1
    stretched: dict[float, float] = {}
    now = before = 0.0
    busy = 0
    for time in sorted(changes):
        slowed = 1 + sharing * max(0, busy - 1)
        now += (time - before) * slowed
        stretched[time] = now
        before = time
        busy += changes[time]
    events = [
        task._replace(start=stretched[task.start], end=stretched[task.end])
        for task in timeline.tasks
    ]
    return replace(timeline, events=events, seconds=now + timeline.seconds - before)
