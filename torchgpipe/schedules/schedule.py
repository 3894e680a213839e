"""A schedule: which device has each stage, and what each device does, in order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat, starmap
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from torchgpipe.schedules.action import Action, needs
from torchgpipe.schedules.check import Lists, check, in_turn
from torchgpipe.schedules.replay import Copies, Event, Seconds, Timeline, units
from torchgpipe.schedules.texts import drawn, read, written

Mode = Literal["always", "except_last", "never"]
"""A checkpoint mode: which micro-batches are checkpointed."""
MODES: tuple[Mode, ...] = get_args(Mode)
Targets = defaultdict[int, list[tuple[int, int, float]]]
"""Maps a stage to the stages that it sends to, each with its device and the seconds of a copy."""


@dataclass(frozen=True)
class Schedule:
    """Lists of the actions that each device does in a step, in order.

    The constructor checks that devices can run the lists. Schedules are compared by value. `str`
    returns a picture of the schedule. Layers see the micro-batches in the order of the forwards. So
    if forwards are not in the order of the micro-batches, batch norms update their running
    statistics in the order of the forwards.

    Attributes:
        name: The schedule's name.
        placement: The device of each stage.
        lists: The actions of each device, in order.

    Raises:
        ValueError: If an action is missing, is listed twice, is on a device that does not have its
            stage, or comes before an action that it needs. It is also raised if a device waits for
            ever, or if a recomputation is not directly before its backward. The message names the
            action and the device.
    """

    name: str
    placement: Sequence[int]
    lists: Lists

    def __post_init__(self) -> None:
        """Convert the placement and the lists to tuples, and check the schedule."""
        lists = [tuple(starmap(Action, actions)) for actions in self.lists]
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "lists", tuple(lists))
        _ = self._order  # this property checks the lists

    def __str__(self) -> str:
        """Draw the schedule as text; `torchgpipe.schedules.texts` explains the picture."""
        return drawn(self.replay())

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Schedule":
        """Read a schedule file of `torch.distributed.pipelining`.

        The schedule's name is the file's name without its extension.
        """
        placement, lists = read(file)
        return cls(Path(file).stem, placement, lists)

    def save(self, file: str | PathLike[str]) -> None:
        """Write a schedule file for `torch.distributed.pipelining`, without recomputations."""
        written(file, self.replay(lambda action: action.kind != "recompute"))

    @cached_property
    def _order(self) -> Sequence[Action]:
        """All actions in an order in which a single thread can do them."""
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
        """For each device, the largest number of tasks that wait for their backward at once.

        A task waits from its forward until its backward, and keeps its activations so long. If
        backwards are split into halves, it waits until its backward of weights.
        """
        change = {"forward": 1, "backward": -1, "backward_weights": -1}
        most = []
        for actions in self.lists:
            kept = highest = 0
            for action in actions:
                kept += change.get(action.kind, 0)
                highest = max(highest, kept)
            most.append(highest)
        return most

    def replay(  # noqa: PLR0913 - each is an option of the user's
        self,
        seconds: Seconds = units,
        copies: Copies = (),
        buffered: int | None = None,
        *,
        blocking: bool = False,
        ahead: bool = True,
        loss: float | None = None,
        issue: Seconds | None = None,
    ) -> Timeline:
        """Simulate a step, and return a timeline of when each action runs.

        Every device does the actions of its list in order, each as soon as possible. The timeline
        leaves out recomputations that take no time.

        Args:
            seconds: A function that returns how many seconds an action takes.
            copies: The copies that take time, each as a tuple: the source stage, the target stage,
                and the seconds. A skip's target may be any later stage. Other copies take no time.
            buffered: How many items the buffer between two stages on different devices holds, in
                each direction; `None` for no limit. An item is the activation or the gradient of
                one micro-batch. An item leaves the buffer when the action that needs it starts. A
                device waits if the buffer has no room for its item.
            blocking: Whether a copy occupies both devices, and starts when both are free.
            ahead: Whether a recomputation may start before the gradient of its task arrives.
            loss: How many seconds it takes to compute one loss of the whole mini-batch after all
                forwards, while all other devices wait. With `None`, there is no such loss. With a
                number, the schedule must begin with all forwards.
            issue: A function that returns how many seconds the host needs to issue an action (on a
                GPU, to launch its kernels). With `None`, it needs no time. One thread issues the
                actions of all devices, one after another. Their order is that in which they start
                if each takes the time that `units` returns. A device starts an action after the
                thread has begun to issue it, and ends the action after the thread has issued it.

        Raises:
            ValueError: If a device waits for ever, because `buffered` is too small.
        """
        at = self.placement
        loss_seconds = loss or 0.0
        room = {} if buffered is None else self._room(buffered)
        order = self._order if buffered is None else in_turn(self.lists, room)
        order = order if issue is None else self.replay(ahead=ahead, loss=loss).order
        # For how many seconds the thread issues each action, in this order.
        issues = repeat(0.0) if issue is None else map(issue, order)
        later, earlier = self._targets(copies)
        nowhere: Targets = defaultdict(list)
        # The times when activations and gradients arrive, by micro-batch and stage.
        activations = [[0.0] * len(at) for _ in range(self.micro_batches)]
        gradients = [[0.0] * len(at) for _ in range(self.micro_batches)]
        # For each kind of action: whether the action waits for a tensor from another stage, the
        # times when these tensors arrive, and the stages to which the action's result is sent.
        ways = {
            "forward": (True, activations, later),
            "recompute": (not ahead, gradients, nowhere),
            "backward": (True, gradients, earlier),
            "backward_inputs": (True, gradients, earlier),
            "backward_weights": (False, gradients, nowhere),
        }
        free = [0.0] * len(self.lists)  # the time since which each device is free
        starts: dict[Action, float] = {}
        issued = 0.0  # the time at which the thread has issued all earlier actions
        events: list[Event] = []
        for action, issue_seconds in zip(order, issues, strict=False):
            kind, i, stage = action
            waits, arrivals, targets = ways[kind]
            arrived = arrivals[i]
            d = at[stage]
            if loss is not None and kind != "forward":
                # All forwards have ended. All devices wait while the last stage's device computes
                # the loss.
                begin = max(free) if blocking else free[at[-1]]
                free = [begin + loss] * len(free)
                loss = None
            start = issued if issued > free[d] else free[d]
            issued += issue_seconds
            if waits and arrived[stage] > start:
                start = arrived[stage]
            end = start + seconds(action)
            free[d] = end = issued if issued > end else end
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
        return Timeline(events, max(free), len(self.lists), at, loss_seconds)

    def _targets(self, copies: Copies) -> tuple[Targets, Targets]:
        """Return where each stage sends its outputs, and where it sends gradients of its inputs.

        Each of the two results is a dictionary. It maps a stage to a list of tuples: a stage that
        receives, its device, and the seconds of the copy.
        """
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
        """Map each action that may have to wait for a full buffer to the action that makes room.

        A buffer between two devices holds `buffered` results. So there is room for result k as soon
        as another action takes result k - `buffered` out of the buffer. The dictionary maps the
        action that sends result k to this other action.
        """
        at = self.placement
        takers: dict[Action, Action] = {}
        for action in self._order:
            for other in needs(action, self.actions):
                if at[other.stage] != at[action.stage]:
                    takers[other] = action
        # Maps a source stage and a target stage to the actions that send a result, in order.
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


def checkpointed(mode: Mode, m: int) -> int:
    """Return how many of `m` micro-batches are checkpointed, beginning with the first one.

    The mode `except_last` does not checkpoint the last micro-batch, because its backward follows
    directly after its forward (torchgpipe paper, section 3.2.3).
    """
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def with_recomputations(lists: Lists, m: int, checkpoint: str) -> Lists:
    """Shorten lists to the first m micro-batches, and add recomputations before backwards.

    Args:
        lists: The actions of each device.
        m: How many micro-batches there are.
        checkpoint: Which micro-batches are recomputed: 'always', 'except_last' or 'never'.

    Raises:
        ValueError: If `checkpoint` is none of these three texts.
    """
    if checkpoint not in MODES:
        allowed = ", ".join(map(repr, MODES))
        raise ValueError(f"checkpoint is one of {allowed}, not {checkpoint!r}")
    recomputed = checkpointed(checkpoint, m)
    new: list[list[Action]] = []
    for actions in lists:
        own: list[Action] = []
        for action in actions:
            kind, i, stage = action
            if kind == "recompute" or i >= m:
                continue
            if kind in ("backward", "backward_inputs") and i < recomputed:
                own.append(Action("recompute", i, stage))
            own.append(Action(kind, i, stage))
        new.append(own)
    return new
