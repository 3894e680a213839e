"""A schedule: which device has each stage, and what each device does, in order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from operator import attrgetter
from os import PathLike
from pathlib import Path

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.check import Lists, check, in_turn
from torchgpipe.schedules.replay import Copies, Event, Seconds, Timeline, units
from torchgpipe.schedules.texts import drawn, read, written

Targets = defaultdict[int, list[tuple[int, int, float]]]
"""By stage: the stages that it sends to, their devices, and the seconds of a copy to each."""


@dataclass(frozen=True)
class Schedule:
    """What each device does in a step: lists of actions, which are checked to be possible.

    Schedules are compared by value. `str` returns a picture of one.

    Attributes:
        name: The schedule's name.
        placement: The device of each stage.
        lists: The actions of each device, in order.

    Raises:
        ValueError: If an action is missing, is there twice, is on a device that does not have its
            stage, is before an action that it needs, or would wait for ever; or if a recomputation
            is not directly before its backward. The message names the action and the device.
    """

    name: str
    placement: Sequence[int]
    lists: Lists

    def __post_init__(self) -> None:
        """Make tuples of the placement and the lists, and check them."""
        lists = [tuple(starmap(Action, actions)) for actions in self.lists]
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "lists", tuple(lists))
        _ = self._order  # which checks them

    def __str__(self) -> str:
        """Draw the schedule; `torchgpipe.schedules.texts` says how to read the picture."""
        return drawn(self.replay())

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Schedule":
        """Read a file of `torch.distributed.pipelining`; the file's name becomes the schedule's."""
        placement, lists = read(file)
        return cls(Path(file).stem, placement, lists)

    def save(self, file: str | PathLike[str]) -> None:
        """Write a file for `torch.distributed.pipelining`. Recomputations are left out."""
        written(file, self.replay(lambda action: action.kind != "recompute"))

    @cached_property
    def _order(self) -> Sequence[Action]:
        """All actions in an order in which one thread could do them."""
        return check(self.placement, self.lists)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """The actions of all devices."""
        return frozenset(self._order)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches the schedule is for."""
        last = max(self.actions, key=attrgetter("micro_batch"))
        return 1 + last.micro_batch

    @cached_property
    def halves(self) -> bool:
        """Whether some backwards are split into halves."""
        return any(action.kind == "backward_weights" for action in self.actions)

    @property
    def in_flight(self) -> list[int]:
        """How many tasks each device keeps at most, from their forward to their last backward."""
        change = {"forward": 1, "backward": -1, "backward_weights": -1}
        most = []
        for actions in self.lists:
            kept = highest = 0
            for action in actions:
                kept += change.get(action.kind, 0)
                highest = max(highest, kept)
            most.append(highest)
        return most

    def replay(  # noqa: PLR0913
        self,
        seconds: Seconds = units,
        copies: Copies = (),
        buffered: int | None = None,
        *,
        blocking: bool = False,
        ahead: bool = True,
        loss: float | None = None,
    ) -> Timeline:
        """Return when each action runs if every device does its list in order, as soon as it can.

        Recomputations that take no time are not in the timeline.

        Args:
            seconds: Returns how many seconds an action takes.
            copies: The copies that take time, each as a source stage, a target stage, and
                seconds. A skip's target may be any later stage. Other copies take no time.
            buffered: How many items a boundary between stages on two devices holds in each
                direction; `None` for no limit. An item is the activation or the gradient of one
                micro-batch. It leaves when the action that needs it starts. A device whose item
                finds no room waits.
            blocking: Whether a copy occupies both devices, and starts when both are free.
            ahead: Whether a recomputation may start before the gradient of its task is there.
            loss: The seconds of a loss between the last forward and all other actions, in a
                schedule whose forwards come first; `None` for no loss.

        Raises:
            ValueError: If a device would wait for ever, because `buffered` is too small.
        """
        at = self.placement
        room = {} if buffered is None else self._room(buffered)
        order = self._order if buffered is None else in_turn(self.lists, room)
        later, earlier = self._targets(copies)
        nowhere: Targets = defaultdict(list)
        # When inputs of forwards, and gradients for backwards, arrive: by micro-batch and stage.
        activations = [[0.0] * len(at) for _ in range(self.micro_batches)]
        gradients = [[0.0] * len(at) for _ in range(self.micro_batches)]
        # By kind: whether it waits for an arrival, the table of arrivals, and where results go.
        ways = {
            "forward": (True, activations, later),
            "recompute": (not ahead, gradients, nowhere),
            "backward": (True, gradients, earlier),
            "backward_inputs": (True, gradients, earlier),
            "backward_weights": (False, gradients, nowhere),
        }
        free = [0.0] * len(self.lists)  # since when each device is free
        starts: dict[Action, float] = {}
        events: list[Event] = []
        for action in order:
            kind, i, stage = action
            waits, arrivals, targets = ways[kind]
            arrived = arrivals[i]
            d = at[stage]
            if loss is not None and kind != "forward":
                # All forwards are over. Every device waits for the loss on the last stage's device.
                begin = max(free) if blocking else free[at[-1]]
                free = [begin + loss] * len(free)
                loss = None
            start = free[d]
            if waits and arrived[stage] > start:
                start = arrived[stage]
            free[d] = end = start + seconds(action)
            if end > start or kind != "recompute":
                events.append(Event(*action, start, end))
            if room:
                starts[action] = start
                if action in room:
                    free[d] = end = max(end, starts[room[action]])
            for target, device, delay in targets[stage]:
                arrival = end + delay
                if blocking and delay:
                    arrival = max(free[d], free[device]) + delay
                    free[d] = free[device] = arrival
                if arrival > arrived[target]:
                    arrived[target] = arrival
        return Timeline(events, max(free), len(self.lists), at)

    def _targets(self, copies: Copies) -> tuple[Targets, Targets]:
        """Return where stages send their outputs, and where they send gradients of their inputs."""
        at = self.placement
        later: Targets = defaultdict(list)
        earlier: Targets = defaultdict(list)
        given = list(copies)
        taken = {(source, target) for source, target, _ in given}
        neighbours = pairwise(range(len(at)))
        at_once = [(*pair, 0.0) for pair in neighbours if pair not in taken]
        for source, target, delay in given + at_once:
            later[source].append((target, at[target], delay))
            earlier[target].append((source, at[source], delay))
        return later, earlier

    def _room(self, buffered: int) -> dict[Action, Action]:
        """Return by action which other action has to start before there is room for its result.

        The action that takes an item makes room for the item that is `buffered` places behind it.
        """
        at = self.placement
        takers: dict[Action, Action] = {}
        for action in self._order:
            for other in needs(action, self.actions):
                if at[other.stage] != at[action.stage]:
                    takers[other] = action
        # The actions that send something, in order, by the stages that they send from and to.
        senders: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for actions in self.lists:
            for action in actions:
                taker = takers.get(action)
                if taker is not None:
                    senders[action.stage, taker.stage].append(action)
        room: dict[Action, Action] = {}
        for sent in senders.values():
            for item, later in zip(sent, sent[buffered:], strict=False):
                room[later] = takers[item]
        return room


def recomputing(lists: Lists, m: int, checkpoint: str) -> Lists:
    """Return lists for the first m micro-batches, with recomputations directly before backwards.

    `checkpoint` is 'always', 'except_last' or 'never'.
    """
    checkpointed = {"always": m, "except_last": m - 1, "never": 0}
    if checkpoint not in checkpointed:
        allowed = ", ".join(map(repr, checkpointed))
        raise ValueError(f"checkpoint is one of {allowed}, not {checkpoint!r}")
    new: list[list[Action]] = []
    for actions in lists:
        own: list[Action] = []
        for action in actions:
            kind, i, stage = action
            if kind == "recompute" or i >= m:
                continue
            if kind in ("backward", "backward_inputs") and i < checkpointed[checkpoint]:
                own.append(Action("recompute", i, stage))
            own.append(Action(kind, i, stage))
        new.append(own)
    return new
