"""A schedule: which device has each stage, and what each device does, in order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from os import PathLike
from pathlib import Path

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.check import Lists, check, in_turn
from torchgpipe.schedules.replay import Copies, Event, Seconds, Timeline, units
from torchgpipe.schedules.texts import drawn, read, written


@dataclass(frozen=True)
class Schedule:
    """What devices do in a step, as lists that they can do. It compares by value, and `str` draws its picture.

    Attributes:
        name: what it is called.
        placement: the device of each stage.
        lists: the actions of each device, in order.

    Raises:
        ValueError: an action is missing, twice there, on another device than its stage, before what it needs, or waits
            for ever; or a recomputation is not directly before its backward. One line names the action and the device.
    """

    name: str
    placement: Sequence[int]
    lists: Lists
    _turns: Sequence[tuple[Action, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make tuples of what is given, and check it."""
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(
            self,
            "lists",
            tuple(tuple(Action(*action) for action in actions) for actions in self.lists),
        )
        object.__setattr__(self, "_turns", self._numbered(check(self.placement, self.lists)))

    def __str__(self) -> str:
        """Draw it; `texts` says how."""
        return drawn(self.replay())

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Schedule":
        """Return the schedule in a file of `torch.distributed.pipelining`, called as the file; check it, too."""
        return cls(Path(file).stem, *read(file))

    def save(self, file: str | PathLike[str]) -> None:
        """Write a file for `torch.distributed.pipelining`. Recomputation is left out."""
        written(file, self.replay(lambda action: action.kind != "recompute"))

    @cached_property
    def actions(self) -> frozenset[Action]:
        """What all devices do."""
        return frozenset(action for actions in self.lists for action in actions)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches it is for."""
        return 1 + max(action.micro_batch for action in self.actions)

    @cached_property
    def halves(self) -> bool:
        """Whether some backwards are in halves."""
        return any(action.kind == "backward_weights" for action in self.actions)

    @property
    def in_flight(self) -> list[int]:
        """How many tasks each device keeps at most: their forward is done, and their last backward is not."""
        change = {"forward": 1, "backward": -1, "backward_weights": -1}
        return [
            max(accumulate(change.get(action.kind, 0) for action in actions))
            for actions in self.lists
        ]

    def replay(
        self,
        seconds: Seconds = units,
        copies: Copies = (),
        buffered: int | None = None,
        *,
        blocking: bool = False,
        ahead: bool = True,
        loss: float | None = None,
    ) -> Timeline:
        """Return when each action runs if every device does its own in order, as soon as it can.

        Recomputations that take no time are left out. `seconds` says how long an action takes; `copies` those that take
        time, where alone they are waited for, of skips, too; `ahead`, whether recomputations start before their
        gradients are there. With `blocking`, copies occupy both devices, and start when both are free. `loss`, where
        given, lies between the last forward and all else, in lists whose forwards come first. `buffered` is how many
        items a boundary between stages on two devices holds each way, unlimited by default. An item leaves when the
        action that needs it starts; a device whose item finds no room waits.

        Raises:
            ValueError: with so few buffered items, a device would wait for ever.
        """
        room = {} if buffered is None else self._room(buffered)
        turns = self._turns if buffered is None else self._numbered(in_turn(self.lists, room))
        at, copies = self.placement, [*copies]
        at_once = {
            (s, s + 1, 0.0)
            for s in range(len(at) - 1)
            if all(copy[:2] != (s, s + 1) for copy in copies)
        }
        # To which stages each stage sends: how far on they are, their devices, and the seconds that a copy takes.
        down, up, alone = ([list[tuple[int, int, float]]() for _ in at] for _ in range(3))
        for source, target, delay in [*copies, *at_once]:
            down[source].append((target - source, at[target], delay))
            up[target].append((source - target, at[source], delay))
        ways = {
            "forward": (True, down),
            "recompute": (not ahead, alone),
            "backward": (True, up),
            "backward_inputs": (True, up),
            "backward_weights": (False, alone),
        }
        free, there = [0.0] * len(self.lists), [0.0] * (2 * self.micro_batches * len(at))
        starts: dict[Action, float] = {}
        events: list[Event] = []
        for action, item in turns:
            kind, _, s = action
            waits, targets = ways[kind]
            if loss is not None and kind != "forward":
                free, loss = [(max(free) if blocking else free[at[-1]]) + loss] * len(free), None
            start = free[d := at[s]]
            if waits and there[item] > start:
                start = there[item]
            free[d] = end = start + seconds(action)
            if end > start or kind != "recompute":
                events.append(Event(*action, start, end))
            if room:
                starts[action] = start
                end = free[d] = max(end, starts[room[action]]) if action in room else end
            for step, far, delay in targets[s]:
                arrival = end + delay
                if blocking and delay:
                    arrival = free[d] = free[far] = max(free[d], free[far]) + delay
                if arrival > there[item + step]:
                    there[item + step] = arrival
        return Timeline(events, max(free), len(self.lists), at)

    def _numbered(self, order: Sequence[Action]) -> Sequence[tuple[Action, int]]:
        """Return each action with the number of its item: of the next stage's, the number is one more."""
        stages = len(self.placement)
        return [(x, (2 * x.micro_batch + (x.kind == "forward")) * stages + x.stage) for x in order]

    def _room(self, buffered: int) -> dict[Action, Action]:
        """Return which action has to start before there is room for what another hands on, if one has to."""
        at = self.placement
        needed = [(x, other) for x, _ in self._turns for other in needs(x, self.actions)]
        takers = {other: x for x, other in needed if at[other.stage] != at[x.stage]}
        sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for action in (action for actions in self.lists for action in actions if action in takers):
            sent[action.stage, takers[action].stage].append(action)
        both = [
            pair for items in sent.values() for pair in zip(items, items[buffered:], strict=False)
        ]
        return {later: takers[item] for item, later in both}


def recomputing(lists: Lists, m: int, checkpoint: str) -> Lists:
    """Return lists for the first m micro-batches, with recomputations directly before the backwards they are for."""
    checkpointed = {"always": m, "except_last": m - 1, "never": 0}
    if checkpoint not in checkpointed:
        raise ValueError(
            f"checkpoint is one of {', '.join(map(repr, checkpointed))}, not {checkpoint!r}"
        )
    found: list[list[Action]] = [[] for _ in lists]
    for own, actions in zip(found, lists, strict=True):
        for kind, i, s in (
            action for action in actions if action.kind != "recompute" and action.micro_batch < m
        ):
            if kind in ("backward", "backward_inputs") and i < checkpointed[checkpoint]:
                own.append(Action("recompute", i, s))
            own.append(Action(kind, i, s))
    return found
