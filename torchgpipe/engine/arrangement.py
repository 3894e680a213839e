"""The schedule of a pipeline: which actions each program does, which tasks may run at once, and a report."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchgpipe.schedules import Action, Schedule, make
from torchgpipe.schedules.check import Lists
from torchgpipe.task.stage import Stage


class Orders(NamedTuple):
    """What programs do: by program, its forwards, what is after them, and all in the schedule's order.

    `placement` says which program has each stage.
    """

    placement: Sequence[int]
    forwards: Lists
    rest: Lists
    all: Lists


class Arrangement(NamedTuple):
    """A schedule for `n` devices, with `v` stages on each unless it says that itself, and the device of each stage."""

    schedule: str | Schedule
    n: int
    v: int | None
    placement: Sequence[int]


@lru_cache(maxsize=64)
def arranged(schedule: str | Schedule, stages: int, devices: int | None = None) -> Arrangement:
    """Arrange so many stages, on as many devices if that is given; raise `ValueError` if the schedule has no such."""
    if isinstance(schedule, Schedule):
        if (given := len(schedule.placement)) != stages:
            raise ValueError(
                f"{schedule.name} has {given} stages, but there are {stages} partitions"
            )
        return Arrangement(schedule, len(schedule.lists), None, schedule.placement)
    known = make(schedule, 1, 1)
    usual = len(known.placement)  # stages on a device
    n = max(1, stages // usual if usual == 1 or devices is None else devices)
    if stages % n or 0 < stages < usual * n:
        raise ValueError(
            f"{known.name} needs the same number of stages, at least {usual}, on each device, but there are {stages} "
            f"partitions for {n} devices; give a balance of {usual * n} partitions"
        )
    v = max(1, stages // n)
    return Arrangement(schedule, n, v, make(schedule, n, 1, v).placement[:stages])


@lru_cache(maxsize=64)
def orders(arrangement: Arrangement, m: int, mode: str, apart: bool) -> Orders:
    """Return what a program for each device does, or if not `apart`, one program for all of them.

    There are `m` micro-batches, and recomputations for the checkpoint mode. Raise `ValueError` if with one item at each
    boundary between devices a program would wait for ever.
    """
    schedule, n, v, _ = arrangement
    made = make(schedule, n, m, v)
    cycles = sorted(
        made.replay(lambda action: action.kind == "forward").tasks,
        key=lambda task: (task.start, task[2]),
    )
    if not apart:
        made = Schedule(made.name, [0] * len(made.placement), [made.replay().order])
    made = make(made, len(made.lists), m, checkpoint=mode)
    made.replay(buffered=1)
    # In one program as early on each device as they can be: those of GPipe are in clock cycles.
    alone = made.lists if apart else [[Action(*task[:3]) for task in cycles]]
    forwards = [[action for action in actions if action.kind == "forward"] for actions in alone]
    rest = [[action for action in actions if action.kind != "forward"] for actions in made.lists]
    return Orders(made.placement, forwards, rest, made.lists)


def overlaps(m: int, n: int) -> bool:
    """Return whether tasks can run at once: there are several of both, `m` micro-batches and `n` devices."""
    return m > 1 and n > 1


class ScheduleView:
    """The schedule of a pipeline, with its `name`; its `placement` is each stage's place in `devices`, or its rank."""

    def __init__(self, arrangement: Arrangement, stages: Sequence[Stage]) -> None:
        schedule, n, v, self.placement = arrangement
        made = schedule if isinstance(schedule, Schedule) else make(schedule, n, 1, v)
        self.name, self._splits, self._stages = made.name, made.halves, stages

    def report(self) -> str:
        """Return a line for each stage here: how its backward is split, as far as steps have shown, and if not, why."""
        where = "rank" if len(self._stages) < len(self.placement) else "device"
        lines = []
        for stage in self._stages:
            how = stage.halves if self._splits else f"whole: {self.name} splits none"
            lines.append(f"stage {stage.index} on {where} {self.placement[stage.index]}: {how}")
        return "\n".join(lines)
