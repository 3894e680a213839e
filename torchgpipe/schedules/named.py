"""The schedules that have names, for any number of devices and micro-batches.

Names are those of `torch.distributed.pipelining`, and ZBH1 and ZBH2 of the Zero Bubble paper (arXiv:2401.10241).
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import zip_longest

from torchgpipe.schedules.action import LETTERS, Action, Kind, needs
from torchgpipe.schedules.check import Lists
from torchgpipe.schedules.schedule import Schedule, recomputing


def looped(
    n: int, m: int, v: int, ahead: Callable[[int], int], backward: Kind = "backward"
) -> list[list[Action]]:
    """Return lists of v stages on each device, of which each in turn is for n micro-batches.

    Device d begins with `ahead(d)` forwards; then they alternate with backwards, as far as there are both. Where n does
    not divide m, it is the list for more micro-batches without those that are too many. Larger groups would make the
    bubble smaller, but a boundary would have to hold more than one item.
    """
    lists = []
    for d in range(n):
        stages = range(d, n * v, n)
        forwards = [
            Action("forward", g + i, s) for g in range(0, m, n) for s in stages for i in range(n)
        ]
        backwards = [
            Action(backward, g + i, s)
            for g in range(0, m, n)
            for s in stages[::-1]
            for i in range(n)
        ]
        turns = zip_longest(forwards[ahead(d) :], backwards)
        actions = [*forwards[: ahead(d)], *(action for turn in turns for action in turn if action)]
        lists.append([action for action in actions if action.micro_batch < m])
    return lists


def gpipe(n: int, m: int, v: int) -> Lists:
    """All forwards, then all backwards, the last micro-batch first (arXiv:1811.06965)."""
    return [[*actions[:m], *actions[: m - 1 : -1]] for actions in looped(n, m, 1, lambda d: m)]


def interleaved(n: int, m: int, v: int) -> Lists:
    """Each backward as soon as it can be (arXiv:2104.04473).

    With one stage each, that is 1F1B, and device d keeps n - d micro-batches (arXiv:2006.09503).
    """
    return looped(n, m, v, lambda d: (v - 1) * n + (n - 1 - d) * (1 + (v > 1)))


def fill(lists: Lists, most: int) -> Lists:
    """Return lists of forwards and backwards of inputs with those of weights where devices would wait.

    Nothing else waits for these but the memory that they free. Time is counted in units, one for each action. A device
    that cannot do its next action in a unit, or that would by a forward keep more than `most` tasks, does the oldest
    backward of weights that is left, if there is any.
    """
    among = {action for actions in lists for action in actions}
    left = [deque(actions) for actions in lists]
    weights: list[deque[Action]] = [deque() for _ in lists]
    kept = [0] * len(lists)
    filled: list[list[Action]] = [[] for _ in lists]
    done: set[Action] = set()
    unit = [*among]
    while unit:
        unit = []
        for d, actions in enumerate(left):
            full = kept[d] == most and actions and actions[0].kind == "forward"
            if actions and not full and done.issuperset(needs(actions[0], among)):
                action = actions.popleft()
            elif weights[d]:
                action = weights[d].popleft()
            else:
                continue
            filled[d].append(action)
            kept[d] += (action.kind == "forward") - (action.kind == "backward_weights")
            if action.kind == "backward_inputs":
                weights[d].append(Action("backward_weights", action.micro_batch, action.stage))
            unit.append(action)
        done.update(unit)
    return filled


def zb_h(n: int, m: int, v: int, times: int) -> Lists:
    """1F1B, with weights where a device would wait, or would keep more than n micro-batches (arXiv:2401.10241).

    With `times` as many forwards ahead: of two, no device waits but at the ends, for 2n - 1 micro-batches in memory.
    """
    lists = looped(n, m, 1, lambda d: times * (n - 1 - d), "backward_inputs")
    return fill(lists, times * (n - 1) + 1)


def zb_v(n: int, m: int, v: int) -> Lists:
    """The way goes down the devices and up again, so that none waits but at the ends, and none keeps more than 1F1B.

    A letter is the next micro-batch's action: a large one on the way down, a small one on the way up. With too few
    micro-batches for a steady state, weights are better put where a device would wait.
    """
    lists: list[list[Action]] = []
    for d in range(n):
        letters = (
            "F" * (2 * (n - d) - 1) + "fF" * d + "fiw" * (n - d) + "FIWfiw" * max(m - n, n - 1)
        )
        letters += "Ii" * d + "IW" * (n - d) + "w" * d + "W" * d
        counts: Counter[str] = Counter()
        lists.append([])
        for letter in letters if m >= 2 * n - 1 else letters.replace("w", "").replace("W", ""):
            stage = d if letter.isupper() else 2 * n - 1 - d
            if counts[letter] < m:
                lists[d].append(Action(LETTERS[letter.upper()], counts[letter], stage))
            counts[letter] += 1
    return lists if m >= 2 * n - 1 else fill(lists, 2 * n)


# A name: its lists for n devices, m micro-batches and v stages a device; and which v it has, None where any.
NAMED: dict[str, tuple[Callable[[int, int, int], Lists], int | None]] = {
    "GPipe": (gpipe, 1),
    "1F1B": (interleaved, 1),
    "Interleaved1F1B": (interleaved, None),
    "ZBH1": (partial(zb_h, times=1), 1),
    "ZBH2": (partial(zb_h, times=2), 1),
    "ZBVZeroBubble": (zb_v, 2),
}


def make(
    schedule: str | Schedule, n: int, m: int, v: int | None = None, checkpoint: str = "never"
) -> Schedule:
    """Return the schedule for n devices and m micro-batches: one that has a name, or what is given, cut to fit.

    A name may be in small letters or large; a schedule has at least m micro-batches. Each device has v stages, by
    default as many as the schedule has to have, or 2. `checkpoint` is 'always', 'except_last' or 'never'.

    Raises:
        ValueError: there is no such schedule, or it is not for so many devices, stages or micro-batches.
    """
    if isinstance(schedule, Schedule):
        devices, stages = len(schedule.lists), len(schedule.placement)
        if devices != n or v not in (None, stages / n):
            asked = f"{n} devices" if v is None else f"{n} devices with {v} on each"
            raise ValueError(
                f"{schedule.name} has {stages} stages on {devices} devices, which does not fit {asked}"
            )
        if not 1 <= m <= schedule.micro_batches:
            raise ValueError(
                f"{schedule.name} is for 1 to {schedule.micro_batches} micro-batches, not {m}"
            )
        return Schedule(
            schedule.name, schedule.placement, recomputing(schedule.lists, m, checkpoint)
        )
    name = {name.lower(): name for name in NAMED}.get(str(schedule).lower(), "")
    if not name:
        raise ValueError(
            f"no schedule is called {schedule!r}; there are {', '.join(NAMED)}, or a Schedule of your own"
        )
    lists, only = NAMED[name]
    v = only or 2 if v is None else v
    if only not in (None, v) or min(n, m, v) < 1:
        some = ">= 1" if only is None else f"= {only}"
        raise ValueError(
            f"{name} is for n >= 1 devices, m >= 1 and v {some} stages on each, not {n}, {m} and {v}"
        )
    placement = [*range(n), *reversed(range(n))] if name == "ZBVZeroBubble" else [*range(n)] * v
    return Schedule(name, placement, recomputing(lists(n, m, v), m, checkpoint))


def draw(
    schedule: str | Schedule, n: int, m: int, v: int | None = None, checkpoint: str = "never"
) -> str:
    """Return the picture of a schedule as text; `texts` says how to read it, and `make` what to give."""
    return str(make(schedule, n, m, v, checkpoint))
