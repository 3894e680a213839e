"""Check that devices can do their lists of actions, and find an order of all actions."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

from torchgpipe.schedules.action import LETTERS, Action, needs

Lists = Sequence[Sequence[Action]]
"""The actions of each device, in the order in which the device does them."""

Needs = Mapping[Action, list[Action]]
"""Maps each action to the actions that have to end before it starts."""

Room = Mapping[Action, Action]
"""Maps an action to another action, which has to start to make room for the first one's result."""


def in_turn(lists: Lists, room: Room | None = None) -> list[Action]:
    """Return all actions in an order in which a single thread can do them.

    The result keeps the order of each device's list. Every action comes after the actions that it
    needs. A recomputation also comes after the action that computes the gradient for its backward.
    Results are used as soon as possible. In GPipe, for example, a micro-batch goes through all
    stages before the next micro-batch starts.

    Args:
        lists: The actions of each device.
        room: If buffers between devices are limited: maps an action that may find its buffer full
            to the action that makes room when it starts. By default, no buffer is limited.

    Raises:
        ValueError: If no order is possible. The message names a buffer that has no room, or a
            device that waits for ever and the action that it waits for.
    """
    room = room or {}
    among = dict.fromkeys(chain.from_iterable(lists))
    needed: dict[Action, list[Action]] = {}
    followers: dict[Action, list[Action]] = {}
    for action in among:
        needed[action] = needs(action, among)
        followers[action] = []
    blockers = dict.fromkeys(among, 0)  # how many of its earlier actions are not in `order` yet
    pairs = _pairs(lists, needed, room)
    for earlier, later in pairs:
        followers[earlier].append(later)
        blockers[later] += 1
    ready = [actions[0] for actions in lists if not blockers[actions[0]]]
    order: list[Action] = []
    while ready:
        action = ready.pop()
        order.append(action)
        for follower in followers[action]:
            blockers[follower] -= 1
            if not blockers[follower]:
                ready.append(follower)
    if len(order) < len(among):
        done = set(order)
        _refuse_full_buffer(pairs, done, room)
        _refuse_waiting(lists, needed, done)
    return order


def _pairs(lists: Lists, needed: Needs, room: Room) -> list[tuple[Action, Action]]:
    """Return all pairs (earlier, later) of actions that must run in this order.

    A pair has one of these reasons:

    - Both actions are neighbours in the list of one device.
    - The later action needs the earlier one.
    - The later action is a recomputation, and the earlier one computes the gradient with which the
      backward after the recomputation begins.
    - The earlier action makes room in a buffer for the result of the later one (`room`). The
      function also adds the earlier action to `needed`.
    """
    pairs: list[tuple[Action, Action]] = []
    # Maps a recomputation to the action that computes the gradient for its backward.
    gradients: dict[Action, list[Action]] = {}
    for actions in lists:
        for action, following in pairwise(actions):
            pairs.append((action, following))
            if action.kind == "recompute":
                gradients[action] = needed[following][1:]
    for action, other in room.items():
        needed[action].append(other)
    for action, others in needed.items():
        both = chain(others, gradients.get(action, ()))
        pairs += [(other, action) for other in both]
    return pairs


def _refuse_full_buffer(pairs: list[tuple[Action, Action]], done: set[Action], room: Room) -> None:
    """Raise `ValueError` if actions wait for each other because a buffer between stages is full.

    Actions that wait for each other form a circle. The error names a full buffer in this circle.
    Other full buffers can be mere results of the circle.

    Args:
        pairs: All pairs (earlier, later), as `_pairs` returns them.
        done: The actions that do not wait for ever.
        room: Maps an action to the action that makes room for its result, as for `in_turn`.
    """
    # The first reason of a later action counts. Want of room comes after all other reasons.
    waits: dict[Action, Action] = {}
    for earlier, later in pairs:
        if earlier not in done:
            waits.setdefault(later, earlier)
    action = next(iter(waits))
    # After so many steps to the action that is waited for, the action is in a circle.
    for _ in waits:
        action = waits[action]
    for _ in waits:
        other = waits[action]
        if room.get(action) == other:
            raise ValueError(
                f"there is no room between stage {action.stage} and stage {other.stage}: the "
                f"{action} has to wait until the {other} starts, which never happens; let stage "
                f"{other.stage} take each result of stage {action.stage} before the next one is "
                "sent, and in the same order"
            )
        action = other


def _refuse_waiting(lists: Lists, needed: Needs, done: set[Action]) -> None:
    """Raise `ValueError` if an action waits for ever, which means that it is not in `done`."""
    for d, actions in enumerate(lists):
        for action in actions:
            if action in done:
                continue
            for other in needed[action]:
                if other not in done:
                    raise ValueError(f"device {d} waits for ever: {action} needs {other}")


def check(placement: Sequence[int], lists: Lists) -> list[Action]:
    """Check the lists of a schedule, and return all actions in the order of `in_turn`.

    Raises:
        ValueError: If devices cannot run the lists; the docstring of `Schedule` says when.
    """
    devices = set(placement)
    if not placement or devices != set(range(len(lists))):
        raise ValueError(
            f"stages are on devices {sorted(devices)}, but lists are for {len(lists)} devices; "
            "give one list of actions for each device"
        )
    places = _places(placement, lists)
    _check_complete(placement, places)
    _check_order(placement, lists, places)
    return in_turn(lists)


def _places(placement: Sequence[int], lists: Lists) -> dict[Action, int]:
    """Return the index of each action in its device's list; raise `ValueError` for a wrong action.

    An action is wrong if it has an unknown kind, is listed twice, or is on a device that does not
    have its stage.
    """
    kinds = LETTERS.values()
    places: dict[Action, int] = {}
    for d, actions in enumerate(lists):
        own = [stage for stage, device in enumerate(placement) if device == d]
        for place, action in enumerate(actions):
            if action.kind not in kinds:
                raise ValueError(f"device {d} does {action}, but kinds are {', '.join(kinds)}")
            if action.stage not in own or action.micro_batch < 0:
                raise ValueError(f"device {d} has stages {own}, and cannot do {action}")
            if action in places:
                raise ValueError(f"device {d} does {action} twice")
            places[action] = place
    return places


def _check_complete(placement: Sequence[int], actions: Iterable[Action]) -> None:
    """Check that each stage has a forward and a backward of each micro-batch.

    The backward is one action or its two halves, but not both.
    """
    present = set(actions)
    last = max((action.micro_batch for action in present), default=0)
    for i in range(last + 1):
        for stage, d in enumerate(placement):
            forward = Action("forward", i, stage)
            whole = Action("backward", i, stage)
            halves = [Action("backward_inputs", i, stage), Action("backward_weights", i, stage)]
            split = not present.isdisjoint(halves)
            backward = halves if split else [whole]
            for action in (forward, *backward):
                if action not in present:
                    raise ValueError(f"device {d} lacks {action}")
            if split and whole in present:
                raise ValueError(f"device {d} does {whole} twice: as a whole, and in halves")


def _check_order(placement: Sequence[int], lists: Lists, places: Mapping[Action, int]) -> None:
    """Check that, on each device, an action comes after the actions that it needs.

    Also check that each recomputation is directly before its backward.
    """
    for action, place in places.items():
        d = placement[action.stage]
        for other in needs(action, places):
            if placement[other.stage] == d and places[other] > place:
                raise ValueError(f"device {d} does {action} before {other}, which it needs")
        if action.kind == "recompute":
            # There is a next action, because the backward of this micro-batch comes later.
            following = lists[d][place + 1]
            if following[1:] != action[1:]:
                raise ValueError(
                    f"device {d} does {action} before {following}, not directly before its backward"
                )
