"""Check that devices can do their lists of actions, and find an order in which one thread could do them all."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, product

from torchgpipe.schedules.action import LETTERS, Action, needs

Lists = Sequence[Sequence[Action]]


def in_turn(lists: Lists, room: Mapping[Action, Action] | None = None) -> list[Action]:
    """Return all actions in one order that is that of each list, and has an action behind what it needs.

    Recomputations, as their backwards, are behind what these need. What `room` maps an action to has to start before
    there is room for what the action makes. That is used as soon as it can be: in GPipe, a micro-batch goes through all
    stages before the next.

    Raises:
        ValueError: there is none. The message names a device that waits for ever, and for what.
    """
    pairs = [*chain.from_iterable(map(pairwise, lists))]
    among = dict.fromkeys(chain.from_iterable(lists))
    needed = {action: needs(action, among) for action in among}
    behind = {action: needed[after][1:] for action, after in pairs if action.kind == "recompute"}
    for action, other in (room or {}).items():
        needed[action].append(other)
    waiting: dict[Action, list[Action]] = {action: [] for action in among}
    left = dict.fromkeys(among, 0)  # what it still waits for
    for other, action in [
        *pairs,
        *((other, x) for x in among for other in (*needed[x], *behind.get(x, ()))),
    ]:
        waiting[other].append(action)
        left[action] += 1
    ready = [actions[0] for actions in lists if actions and not left[actions[0]]]
    order: list[Action] = []
    while ready:
        order.append(ready.pop())
        for action in waiting[order[-1]]:
            left[action] -= 1
            if not left[action]:
                ready.append(action)
    done = {*order}
    for d, action in (
        (d, action) for d, actions in enumerate(lists) for action in actions if action not in done
    ):
        for other in (other for other in needed[action] if other not in done):
            full = (
                ", to make room at the boundary between the two"
                if (room or {}).get(action) == other
                else ""
            )
            raise ValueError(f"device {d} waits for ever: {action} needs {other}{full}")
    return order


def check(placement: Sequence[int], lists: Lists) -> list[Action]:
    """Return all actions in turn, or raise what `Schedule` says."""
    if not placement or set(placement) != set(range(len(lists))):
        raise ValueError(
            f"stages are on devices {sorted(set(placement))}, but lists are for {len(lists)} devices"
        )
    at: dict[Action, int] = {}
    for d, actions in enumerate(lists):
        own = [s for s, device in enumerate(placement) if device == d]
        for k, action in enumerate(actions):
            if action.kind not in LETTERS.values():
                raise ValueError(
                    f"device {d} does {action}, but kinds are {', '.join(LETTERS.values())}"
                )
            if action.stage not in own or action.micro_batch < 0:
                raise ValueError(f"device {d} has stages {own}, and cannot do {action}")
            if action in at:
                raise ValueError(f"device {d} does {action} twice")
            at[action] = k
    for i, s in product(
        range(1 + max((action.micro_batch for action in at), default=0)), range(len(placement))
    ):
        whole, *halves = (
            Action(kind, i, s) for kind in ("backward", "backward_inputs", "backward_weights")
        )
        split = not at.keys().isdisjoint(halves)
        for action in (Action("forward", i, s), *(halves if split else [whole])):
            if action not in at:
                raise ValueError(f"device {placement[s]} lacks {action}")
        if split and whole in at:
            raise ValueError(f"device {placement[s]} does {whole} twice: as a whole, and in halves")
    for action, k in at.items():
        d = placement[action.stage]
        for other in needs(action, at):
            if placement[other.stage] == d and at[other] > k:
                raise ValueError(f"device {d} does {action} before {other}, which it needs")
        if (
            action.kind == "recompute" and lists[d][k + 1][1:] != action[1:]
        ):  # that backward is behind: it goes on
            raise ValueError(
                f"device {d} does {action} before {lists[d][k + 1]}, not directly before its backward"
            )
    return in_turn(lists)
