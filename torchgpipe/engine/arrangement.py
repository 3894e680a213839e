"""Assign stages to devices, and list the actions of each device in the schedule's order."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from torchgpipe.caught import how_many, shortened
from torchgpipe.schedules import Action, Schedule, make
from torchgpipe.schedules.check import Lists
from torchgpipe.task.stage import Stage


class Orders(NamedTuple):
    """The actions (forwards, backwards and so on) of each program, in order.

    A program runs the actions of one device, or of all devices, one after another.

    Attributes:
        placement: For each stage, the index of the program that runs it.
        forwards: The forwards of each program.
        rest: All other actions of each program.
        all: All actions of each program.
    """

    placement: Sequence[int]
    forwards: Lists
    rest: Lists
    all: Lists


class Arrangement(NamedTuple):
    """A schedule, and the device of each stage.

    Attributes:
        schedule: The name of the schedule, or the user's own `Schedule`.
        n: The number of devices.
        v: The number of stages on each device; `None` for the user's own `Schedule`, which may give
            devices different numbers of stages.
        placement: For each stage, the index of its device.
    """

    schedule: str | Schedule
    n: int
    v: int | None
    placement: Sequence[int]


def arranged(schedule: str | Schedule, stages: int, devices: int | None = None) -> Arrangement:
    """Assign stages to devices.

    Args:
        schedule: The schedule or its name.
        stages: The number of stages.
        devices: The number of devices. By default, as many as the schedule needs for the stages.

    Raises:
        TypeError: If the schedule is neither a name nor a `Schedule`.
        ValueError: If the schedule does not support these numbers of stages and devices.
    """
    if not isinstance(schedule, str | Schedule):
        raise TypeError(
            f"schedule must be a name such as '1F1B', or a torchgpipe.schedules.Schedule(name, "
            f"placement, lists), but got {shortened(schedule)}"
        )
    return _arranged(schedule, stages, devices)


@lru_cache(maxsize=64)
def _arranged(schedule: str | Schedule, stages: int, devices: int | None) -> Arrangement:
    if isinstance(schedule, Schedule):
        given = len(schedule.placement)
        if given != stages:
            raise ValueError(
                f"{schedule.name} has {given} stages, but there are {stages} partitions"
            )
        return Arrangement(schedule, len(schedule.lists), None, schedule.placement)
    known = make(schedule, 1, 1)
    usual = len(known.placement)  # stages on a device
    n = stages // usual if usual == 1 or devices is None else devices
    n = max(1, n)
    if stages % n or 0 < stages < usual * n:
        raise ValueError(
            f"the schedule {known.name} needs the same number of partitions, at least {usual}, on "
            f"each device, but the balance has {stages} for {how_many(n, 'device')}; give a "
            f"balance of {usual * n} partitions"
        )
    v = max(1, stages // n)
    return Arrangement(schedule, n, v, make(schedule, n, 1, v).placement[:stages])


@lru_cache(maxsize=64)
def orders(arrangement: Arrangement, m: int, mode: str, apart: bool) -> Orders:
    """Return the actions (forwards, recomputations and backwards) of each program, in order.

    A program runs the actions of one device, or of all devices.

    Args:
        arrangement: The schedule, and the device of each stage.
        m: The number of micro-batches.
        mode: The checkpoint mode, which says which micro-batches are recomputed.
        apart: Whether each device has its own program. Otherwise one program serves all devices.

    Raises:
        ValueError: If the programs would wait for each other for ever. This can happen, because
            there is room for only one item (the tensors of a task) between two stages.
    """
    schedule, n, v, _ = arrangement
    once = make(schedule, n, m, v)
    if not apart:
        order = once.replay().order
        merged = Schedule(once.name, [0] * len(once.placement), [order])
        used = make(merged, 1, m, checkpoint=mode)
    else:
        used = make(once, len(once.lists), m, checkpoint=mode)
    used.replay(buffered=1)  # raises an error if programs would wait for each other for ever
    # If one program serves all devices, it runs the forwards in the order in which they would start
    # on separate devices. For GPipe, this is the order of the clock cycles.
    lists = used.lists if apart else [_by_start(once)]
    forwards = [_parted(actions, forward=True) for actions in lists]
    rest = [_parted(actions, forward=False) for actions in used.lists]
    return Orders(used.placement, forwards, rest, used.lists)


def warn_of_order(arrangement: Arrangement, stages: Sequence[Stage]) -> None:
    """Warn if batch norms will see the micro-batches in another order than without a pipeline."""
    schedule = arrangement.schedule
    if not isinstance(schedule, Schedule):
        return
    for stage in stages:
        numbers = []
        for kind, i, index in schedule.lists[schedule.placement[stage.index]]:
            if kind == "forward" and index == stage.index:
                numbers.append(i)
        if numbers == sorted(numbers):
            continue
        norms = [m for m in stage.modules if isinstance(m, _NormBase) and m.track_running_stats]
        changing = [m for m in norms if m.training and m not in set(stage.deferred_norms)]
        if changing:
            advice = "let the schedule run the forwards in order"
            if all(isinstance(m, _BatchNorm) for m in changing):
                advice = "use deferred_batch_norm=True"
            warnings.warn(
                f"stage {stage.index} has a {type(changing[0]).__name__}, but {schedule.name} does "
                "not run the forwards of its micro-batches in order; so the running statistics are "
                f"updated in another order than without a pipeline; {advice}",
                stacklevel=6,
            )


def _parted(actions: Sequence[Action], *, forward: bool) -> list[Action]:
    return [action for action in actions if (action.kind == "forward") == forward]


def _by_start(schedule: Schedule) -> list[Action]:
    """Return the forwards, sorted by their start times in a simulation of the schedule."""
    timeline = schedule.replay(lambda action: action.kind == "forward")
    tasks = sorted(timeline.tasks, key=lambda task: (task.start, task[2]))
    return [Action(*task[:3]) for task in tasks]


def overlaps(m: int, n: int) -> bool:
    """Return whether several tasks can run at the same time.

    This needs several micro-batches (m > 1) and several devices (n > 1).
    """
    return m > 1 and n > 1


WIDTH = 100
"""The widest picture of a schedule, in characters, that `print(model.schedule)` shows."""


class ScheduleView:
    """The schedule of a pipeline, for the user to read.

    Args:
        arrangement: The schedule, and the device of each stage.
        stages: The stages of this process.
        m: The number of micro-batches.
        mode: The checkpoint mode.

    Attributes:
        name: The name of the schedule.
        splits: Whether the schedule splits backwards into two halves.
        placement: For each stage, the index of its device in `devices`; over ranks, the stage's
        rank.
    """

    def __init__(
        self, arrangement: Arrangement, stages: Sequence[Stage], m: int, mode: str
    ) -> None:
        schedule, n, v, self.placement = arrangement
        made = schedule if isinstance(schedule, Schedule) else make(schedule, n, 1, v)
        self.name, self.splits, self._stages = made.name, made.halves, stages
        if isinstance(schedule, Schedule):
            m = min(m, schedule.micro_batches)
        self._made = (schedule, n, m, v, mode)

    def __repr__(self) -> str:
        """Return a line about the schedule, a line for each stage, and a picture of the schedule.

        The picture is left out if it is wider than `WIDTH`.
        """
        lines = [f"{self.name}, stages on {[*self.placement]}", self.report()]
        if self.placement:
            picture = str(make(*self._made))
            if max(map(len, picture.splitlines())) <= WIDTH:
                lines.append(picture)
        return "\n".join(lines)

    def report(self) -> str:
        """Return a line for each stage of this process: how its backward is split, or why not.

        Some schedules split a backward into two halves: the gradients of inputs, and later those of
        weights. The lines can change after the first step.
        """
        where = "rank" if len(self._stages) < len(self.placement) else "device"
        lines = []
        for stage in self._stages:
            how = stage.halves if self.splits else f"backward is not split by {self.name}"
            lines.append(f"stage {stage.index} on {where} {self.placement[stage.index]}: {how}")
        return "\n".join(lines)
