"""List the moments of a step at which a device may hold the most bytes."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from torchgpipe.schedules import Kind, Schedule
from torchgpipe.schedules.action import Action
from torchgpipe.schedules.replay import units


class InFlight(NamedTuple):
    """How many tasks of one stage are in flight, apart from the task that is running."""

    checkpointed: int
    plain: int
    """Tasks that are not checkpointed."""
    later: int
    """Tasks of which only the backward of the weights is left."""


class Traffic(NamedTuple):
    """How many skips and gradients of skips lie between two stages, in micro-batches.

    The memory of `source`'s device is counted. `source` stashes the skips that `away` and `early`
    count, and it pops the skips whose gradients `waiting` counts.
    """

    source: int
    target: int
    away: int
    """Skips that `source` has stashed and `target` has not popped yet."""
    early: int
    """Gradients that `target` has sent before the backward of `source` can use them."""
    waiting: int
    """Gradients that `source` has made and `target` has not used yet."""


class Moment(NamedTuple):
    """The action that runs on a device, and what the device holds during the action."""

    kind: Kind
    stage: int
    recomputed: bool
    """Whether the task is checkpointed."""
    stages: tuple[int, ...]
    """The stages on the device. The next three fields have one item for each of them."""
    coming: tuple[bool, ...]
    """Whether the stage has forwards left to do."""
    begun: tuple[bool, ...]
    """Whether the stage has done a backward."""
    held: tuple[InFlight, ...]
    skips: tuple[Traffic, ...] = ()
    """The traffic from each stage on the device to each stage of the pipeline."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many things of each sort take memory at this moment, in a fixed order."""
        counts: list[int] = []
        for in_flight in self.held:
            counts += in_flight
        for traffic in self.skips:
            counts += traffic[2:]
        return tuple(counts)


@lru_cache(maxsize=64)
def moments(lists: Schedule, recomputed: int, skips: bool) -> list[list[Moment]]:
    """Return the moments at which each device may hold the most bytes.

    A moment is left out if the device does the same at another moment and holds at least as much
    of everything then.

    Args:
        lists: The schedule, with a recomputation of every task.
        recomputed: How many micro-batches are checkpointed. They are the first ones.
        skips: Whether skips go from one stage to another.
    """
    clock = _Clock(lists) if skips else None
    found = []
    for actions in lists.lists:
        states = {}
        for stage in sorted({action.stage for action in actions}):
            states[stage] = _State(lists.micro_batches)
        own = tuple(states)
        fullest: dict[object, dict[tuple[int, ...], Moment]] = defaultdict(dict)
        for k, action in enumerate(actions):
            plain = action.micro_batch >= recomputed
            if action.kind == "recompute" and plain:
                continue
            traffic: tuple[Traffic, ...] = ()
            if clock is not None:
                # The clock has no recomputations. A recomputation is directly before its backward.
                timed = actions[k + 1] if action.kind == "recompute" else action
                traffic = clock.traffic(own, timed)
            state = states[action.stage]
            state.begin(action.kind, plain)
            now = Moment(
                action.kind,
                action.stage,
                not plain,
                own,
                coming=tuple([state.left > 0 for state in states.values()]),
                begun=tuple([state.begun for state in states.values()]),
                held=tuple([state.in_flight() for state in states.values()]),
                skips=traffic,
            )
            _add(fullest[now[:6]], now)
            state.end(action.kind, plain)
        kept: list[Moment] = []
        for alike in fullest.values():
            kept += alike.values()
        found.append(kept)
    return found


@dataclass
class _State:
    """What one stage has left to do, and how many of its tasks are in flight."""

    left: int
    """How many forwards the stage has left to do."""
    begun: bool = False
    checkpointed: int = 0
    plain: int = 0
    later: int = 0

    def in_flight(self) -> InFlight:
        return InFlight(self.checkpointed, self.plain, self.later)

    def begin(self, kind: Kind, plain: bool) -> None:
        """Begin an action: its task no longer counts among those in flight."""
        if kind == "forward":
            self.left -= 1
        elif kind == "recompute":
            self.checkpointed -= 1
        elif kind == "backward_weights":
            self.later -= 1
        elif plain:
            self.plain -= 1

    def end(self, kind: Kind, plain: bool) -> None:
        """End an action: what its task keeps for later counts again."""
        if kind == "forward" and plain:
            self.plain += 1
        elif kind == "forward":
            self.checkpointed += 1
        elif kind == "backward_inputs":
            self.later += 1
        if kind in ("backward", "backward_inputs"):
            self.begun = True


class _Clock:
    """A replay of a schedule in units of time, which tells what is done at an action."""

    def __init__(self, lists: Schedule) -> None:
        self._stages = range(len(lists.placement))
        self._times: dict[tuple[Kind, int, int], tuple[float, float]] = {}
        self._forwards: dict[int, list[float]] = defaultdict(list)
        """The times at which each stage ends a forward."""
        self._backwards: dict[int, list[float]] = defaultdict(list)
        """The times at which each stage has the gradients of its inputs."""
        for kind, micro_batch, stage, start, end in lists.replay(_duration, ahead=False).events:
            self._times[kind, micro_batch, stage] = start, end
            if kind == "forward":
                self._forwards[stage].append(end)
            elif kind != "backward_weights":
                self._backwards[stage].append(end)

    def traffic(self, own: Sequence[int], action: Action) -> tuple[Traffic, ...]:
        """Return the traffic from each stage in `own` to each stage, while the action runs."""
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


def _add(alike: dict[tuple[int, ...], Moment], now: Moment) -> None:
    """Add a moment to those alike, which are known by their counts; keep those with the largest."""
    counts = now.counts
    if any(_covers(known, counts) for known in alike):
        return
    smaller = [known for known in alike if _covers(counts, known)]
    for known in smaller:
        del alike[known]
    alike[counts] = now


def _covers(more: Sequence[int], less: Sequence[int]) -> bool:
    return all(map(ge, more, less))
