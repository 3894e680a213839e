"""Find the actions of a training step during which a device's memory can reach its peak.

The prediction of the peak memory looks only at these actions.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from torchgpipe.schedules import Kind, Schedule
from torchgpipe.schedules.action import Action
from torchgpipe.schedules.replay import units


class InFlight(NamedTuple):
    """How many tasks of a stage have done their forward, and have a backward left to do.

    The running task does not count.
    """

    checkpointed: int
    plain: int
    """Tasks that are not checkpointed."""
    later: int
    """Tasks that have only the gradients of their weights left to compute."""


class Traffic(NamedTuple):
    """How many micro-batches have skips, or skips' gradients, on their way between two stages.

    Only skips and gradients that take memory on the device of the stage `source` count. The other
    stage is `target`. Some skips go from `source` to `target`, and others from `target` to
    `source`.
    """

    source: int
    target: int
    away: int
    """Micro-batches with skips that `source` has stashed and `target` has not popped yet."""
    early: int
    """Micro-batches with gradients that `target` has sent and `source` has not used yet.

    They are gradients of skips that `source` has stashed.
    """
    waiting: int
    """Micro-batches with gradients that `source` has made and `target` has not used yet.

    They are gradients of skips that `source` has popped.
    """


class Moment(NamedTuple):
    """An action on a device, and the tasks and skips that take the device's memory meanwhile."""

    kind: Kind
    stage: int
    recomputed: bool
    """Whether the task is checkpointed."""
    stages: tuple[int, ...]
    """The stages on the device. The next three fields have one item for each of these stages."""
    coming: tuple[bool, ...]
    """Whether the stage has forwards left to do."""
    begun: tuple[bool, ...]
    """Whether the stage has done a backward."""
    held: tuple[InFlight, ...]
    skips: tuple[Traffic, ...] = ()
    """The traffic from each stage on the device to each stage of the pipeline."""

    @property
    def counts(self) -> tuple[int, ...]:
        """All numbers of tasks in `held` and of micro-batches in `skips`, as one tuple.

        The larger these numbers are, the more memory the device uses. So an action cannot reach the
        peak of memory if all these numbers are at least as large for another action of the same
        kind.
        """
        counts: list[int] = []
        for in_flight in self.held:
            counts += in_flight
        for traffic in self.skips:
            counts += (traffic.away, traffic.early, traffic.waiting)
        return tuple(counts)


Alike = dict[tuple[int, ...], Moment]
"""Moments at which a device runs the same kind of action; the keys are their `counts`."""


@lru_cache(maxsize=64)
def moments(schedule: Schedule, recomputed: int, skips: bool) -> list[list[Moment]]:
    """Return a list for each device: the actions during which its memory can reach its peak.

    An action is left out if there is another action of the same kind during which at least as many
    tasks and skips of each sort take the device's memory.

    Args:
        schedule: The schedule, with a recomputation of every task.
        recomputed: How many micro-batches are checkpointed: the first `recomputed` micro-batches.
        skips: Whether skips go from one stage to another.
    """
    clock = _Clock(schedule) if skips else None
    found = []
    for actions in schedule.lists:
        fullest: dict[object, Alike] = defaultdict(dict)
        for now in _walk(actions, schedule.micro_batches, recomputed, clock):
            _add(fullest[now.kind, now.stage, now.recomputed, now.coming, now.begun], now)
        kept: list[Moment] = []
        for alike in fullest.values():
            kept += alike.values()
        found.append(kept)
    return found


def _walk(
    actions: Sequence[Action], micro_batches: int, recomputed: int, clock: "_Clock | None"
) -> Iterator[Moment]:
    """Yield a `Moment` for each action of one device, in the order of the actions."""
    own = tuple(sorted({action.stage for action in actions}))
    states = {stage: _State(micro_batches) for stage in own}
    for k, action in enumerate(actions):
        kind, micro_batch, stage = action
        plain = micro_batch >= recomputed
        if kind == "recompute" and plain:
            continue
        traffic: tuple[Traffic, ...] = ()
        if clock is not None:
            # In the replay of `clock`, a recomputation takes no time. So count the skips during the
            # next action instead, which is the backward of the same task.
            timed = actions[k + 1] if kind == "recompute" else action
            traffic = clock.traffic(own, timed)
        states[stage].begin(kind, plain)
        coming = tuple([state.left > 0 for state in states.values()])
        begun = tuple([state.begun for state in states.values()])
        held = tuple([state.in_flight() for state in states.values()])
        yield Moment(kind, stage, not plain, own, coming, begun, held, traffic)
        states[stage].end(kind, plain)


@dataclass
class _State:
    """The state of one stage: how many forwards are left, and how many tasks wait for backward."""

    left: int
    """How many forwards the stage has left to do."""
    begun: bool = False
    checkpointed: int = 0
    plain: int = 0
    later: int = 0

    def in_flight(self) -> InFlight:
        return InFlight(self.checkpointed, self.plain, self.later)

    def begin(self, kind: Kind, plain: bool) -> None:
        """Begin an action of the stage: its task no longer counts as waiting for a backward."""
        if kind == "forward":
            self.left -= 1
        elif kind == "recompute":
            self.checkpointed -= 1
        elif kind == "backward_weights":
            self.later -= 1
        elif plain:
            self.plain -= 1

    def end(self, kind: Kind, plain: bool) -> None:
        """End an action of the stage: its task counts as waiting if a backward is left to do."""
        if kind == "forward" and plain:
            self.plain += 1
        elif kind == "forward":
            self.checkpointed += 1
        elif kind == "backward_inputs":
            self.later += 1
        if kind in ("backward", "backward_inputs"):
            self.begun = True


class _Clock:
    """Count how many forwards and backwards have ended before an action, by replaying a schedule.

    In the replay, a whole backward takes two units of time, and a recomputation takes no time. Each
    other action takes one unit.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._stages = range(len(schedule.placement))
        self._times: dict[tuple[Kind, int, int], tuple[float, float]] = {}
        self._forwards: dict[int, list[float]] = defaultdict(list)
        """The times at which each stage ends a forward."""
        self._backwards: dict[int, list[float]] = defaultdict(list)
        """The times at which each stage has the gradients of its inputs."""
        for kind, micro_batch, stage, start, end in schedule.replay(_duration, ahead=False).events:
            self._times[kind, micro_batch, stage] = start, end
            if kind == "forward":
                self._forwards[stage].append(end)
            elif kind != "backward_weights":
                self._backwards[stage].append(end)

    def traffic(self, own: Sequence[int], action: Action) -> tuple[Traffic, ...]:
        """Return the `Traffic` during `action`: how many micro-batches have skips on their way.

        The list has an item for each pair of a stage in `own` and any stage of the pipeline.
        """
        start, end = self._times[action]
        forwards = [bisect_right(self._forwards[s], start) for s in self._stages]
        backwards = [bisect_right(self._backwards[s], start) for s in self._stages]
        backwards_at_end = [bisect_right(self._backwards[s], end) for s in self._stages]
        found = []
        for source in own:
            for target in self._stages:
                away = forwards[source] - forwards[target]
                early = backwards_at_end[target] - backwards[source]
                waiting = backwards[source] - backwards[target]
                traffic = Traffic(source, target, max(0, away), max(0, early), max(0, waiting))
                found.append(traffic)
        return tuple(found)


def _duration(action: Action) -> float:
    return 0.0 if action.kind == "recompute" else units(action)


def _add(alike: Alike, now: Moment) -> None:
    """Add an action to `alike`, unless an action in `alike` needs at least as much memory.

    If the new action is added, delete all actions from `alike` that need no more memory than the
    new one. All these actions are of the same kind.
    """
    counts = now.counts
    if any(_covers(known, counts) for known in alike):
        return
    smaller = [known for known in alike if _covers(counts, known)]
    for known in smaller:
        del alike[known]
    alike[counts] = now


def _covers(more: Sequence[int], less: Sequence[int]) -> bool:
    return all(map(ge, more, less))
