"""The schedules that have names, for any number of devices and micro-batches.

The names are those of `torch.distributed.pipelining`, and ZBH1 and ZBH2 are from the Zero Bubble
paper (arXiv:2401.10241). Each function here returns the lists of one schedule for n devices, m
micro-batches and v stages on each device. `torchgpipe.schedules.texts` says how to read a picture.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import chain, zip_longest

from torchgpipe.schedules.action import LETTERS, Action, Kind, needs
from torchgpipe.schedules.check import Lists
from torchgpipe.schedules.schedule import Schedule, recomputing


def looped(
    n: int, m: int, v: int, ahead: Callable[[int], int], backward: Kind = "backward"
) -> list[list[Action]]:
    """Return lists in which a device does n micro-batches on one stage, then on its next stage.

    Device d begins with `ahead(d)` forwards. Then forwards and backwards take turns, until only one
    of the two is left. If n does not divide m, the lists are those for the next multiple of n,
    without the micro-batches that are too many. Larger groups than n would make the bubble smaller,
    but then a boundary between devices would have to hold more than one item.

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has. Device d has the stages d, d + n, d + 2n and so on.
        ahead: Returns how many forwards a device does before its first backward.
        backward: The kind of the backwards.
    """
    lists = []
    for d in range(n):
        stages = range(d, n * v, n)
        forwards: list[Action] = []
        backwards: list[Action] = []
        for first in range(0, m, n):
            group = range(first, first + n)
            for stage in stages:
                forwards += [Action("forward", i, stage) for i in group]
            for stage in reversed(stages):
                backwards += [Action(backward, i, stage) for i in group]
        begun = ahead(d)
        actions = forwards[:begun]
        for turn in zip_longest(forwards[begun:], backwards):
            actions += filter(None, turn)
        lists.append([action for action in actions if action.micro_batch < m])
    return lists


def gpipe(n: int, m: int, v: int) -> Lists:
    """Return the lists of GPipe (arXiv:1811.06965).

    A device does all forwards, and then all backwards, the last micro-batch first::

        0 | 0 1 2 3 . . . . . . B3  B2  B1  B0
        1 | . 0 1 2 3 . . . B3  B2  B1  B0
        2 | . . 0 1 2 3 B3  B2  B1  B0
    """
    lists = []
    for actions in looped(n, m, 1, lambda d: m):
        forwards, backwards = actions[:m], actions[m:]
        lists.append([*forwards, *reversed(backwards)])
    return lists


def interleaved(n: int, m: int, v: int) -> Lists:
    """Return the lists of 1F1B, or of interleaved 1F1B if there are several stages on each device.

    A backward comes as soon as it can. In 1F1B (arXiv:2006.09503), device d keeps at most n - d
    micro-batches::

        0 | 0 1 2 . . . . B0  3 B1  . B2  . B3
        1 | . 0 1 . . B0  2 B1  3 B2  . B3
        2 | . . 0 B0  1 B1  2 B2  3 B3

    Several stages on each device make the bubble smaller (arXiv:2104.04473)::

        0 | 0a 1a 0b 1b 2a .  B0b   3a B1b   2b B0a   3b B1a   .  B2b   .  B3b   B2a   B3a
        1 | .  0a 1a 0b B0b   1b B1b   2a B0a   3a B1a   2b B2b   3b B3b   B2a   B3a
    """
    per_device = 1 if v == 1 else 2  # forwards that a device has ahead of the device after it
    return looped(n, m, v, lambda d: (v - 1) * n + per_device * (n - 1 - d))


def fill(lists: Lists, most: int) -> Lists:
    """Return lists with backwards of weights where devices would wait.

    No other action needs a backward of weights, which only frees memory. So each action takes one
    unit of time here, and a device that cannot do its next action in a unit does its oldest
    backward of weights that is left, if there is one.

    Args:
        lists: The forwards and the backwards of inputs of each device.
        most: How many tasks a device may keep at most; before it would keep more by a forward, it
            does a backward of weights.
    """
    among = set(chain.from_iterable(lists))
    change = {"forward": 1, "backward_weights": -1}
    left: list[deque[Action]] = list(map(deque, lists))
    weights: list[deque[Action]] = [deque() for _ in lists]
    kept = [0] * len(lists)
    filled: list[list[Action]] = [[] for _ in lists]
    done: set[Action] = set()
    while True:
        unit: list[Action] = []  # what devices do in this unit of time
        for d, actions in enumerate(left):
            full = kept[d] == most and actions and actions[0].kind == "forward"
            if actions and not full and done.issuperset(needs(actions[0], among)):
                action = actions.popleft()
            elif weights[d]:
                action = weights[d].popleft()
            else:
                continue
            kind, i, stage = action
            if kind == "backward_inputs":
                weights[d].append(Action("backward_weights", i, stage))
            kept[d] += change.get(kind, 0)
            filled[d].append(action)
            unit.append(action)
        if not unit:
            return filled
        done.update(unit)


def zb_h1(n: int, m: int, v: int) -> Lists:
    """Return the lists of ZB-H1 of the Zero Bubble paper (arXiv:2401.10241).

    It is 1F1B with split backwards. A device does a backward of weights where it would wait, or
    would keep more than n micro-batches::

        0 | 0  1  2  .  .  I0 W0 3  I1 W1 I2 W2 I3 W3
        1 | .  0  1  .  I0 2  I1 W0 3  I2 W1 I3 W2 W3
        2 | .  .  0  I0 1  I1 2  I2 W0 3  I3 W1 W2 W3
    """
    lists = looped(n, m, 1, lambda d: n - 1 - d, "backward_inputs")
    return fill(lists, n)


def zb_h2(n: int, m: int, v: int) -> Lists:
    """Return the lists of ZB-H2 of the Zero Bubble paper (arXiv:2401.10241).

    It is ZB-H1 with twice as many forwards before the first backward. If there are enough
    micro-batches, devices wait only at the start and at the end, but they keep 2n - 1
    micro-batches::

        0 | 0  1  2  3  .  I0 W0 I1 W1 I2 W2 I3 W3
        1 | .  0  1  2  I0 3  I1 W0 I2 W1 I3 W2 W3
        2 | .  .  0  I0 1  I1 2  I2 3  I3 W0 W1 W2 W3
    """
    lists = looped(n, m, 1, lambda d: 2 * (n - 1 - d), "backward_inputs")
    return fill(lists, 2 * n - 1)


def zb_v(n: int, m: int, v: int) -> Lists:
    """Return the lists of ZB-V, with two stages on each device.

    A micro-batch goes down the devices, and then up again. So a device keeps no more than in 1F1B,
    and with at least 2n - 1 micro-batches it waits only at the start and at the end::

        0 | 0a  1a  2a  0b  I0b W0b 1b  I1b W1b I0a W0a 2b  I2b W2b I1a W1a I2a W2a
        1 | .   0a  0b  1a  1b  I0b W0b 2a  I0a W0a 2b  I1b W1b I1a I2b I2a W1a W2b W2a
    """
    last = 2 * n - 1  # the last stage, and the fewest micro-batches for which devices never wait
    steady = m >= last
    lists: list[list[Action]] = []
    for d in range(n):
        # A letter is an action for the next micro-batch: a large letter on the way down, a small
        # letter on the way up.
        rest = n - d
        letters = "F" * (2 * rest - 1)
        letters += "fF" * d
        letters += "fiw" * rest
        letters += "FIWfiw" * max(m - n, n - 1)
        letters += "Ii" * d
        letters += "IW" * rest
        letters += "w" * d
        letters += "W" * d
        if not steady:
            letters = letters.replace("w", "").replace("W", "")
        counts: Counter[str] = Counter()
        actions: list[Action] = []
        for letter in letters:
            stage = d if letter.isupper() else last - d
            i = counts[letter]
            if i < m:
                actions.append(Action(LETTERS[letter.upper()], i, stage))
            counts[letter] += 1
        lists.append(actions)
    return lists if steady else fill(lists, 2 * n)


Maker = Callable[[int, int, int], Lists]
"""Returns lists for n devices, m micro-batches and v stages on each device."""

# The maker of each name, and its number of stages on each device; `None` if any number will do.
NAMED: dict[str, tuple[Maker, int | None]] = {
    "GPipe": (gpipe, 1),
    "1F1B": (interleaved, 1),
    "Interleaved1F1B": (interleaved, None),
    "ZBH1": (zb_h1, 1),
    "ZBH2": (zb_h2, 1),
    "ZBVZeroBubble": (zb_v, 2),
}


def make(
    schedule: str | Schedule, n: int, m: int, v: int | None = None, checkpoint: str = "never"
) -> Schedule:
    """Return the schedule with a name, or cut a given schedule to fit.

    Args:
        schedule: A name, in small or large letters, or a schedule for at least m micro-batches.
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has. By default it is the number that the schedule asks for;
            if any number will do, it is 2.
        checkpoint: Which micro-batches are recomputed: 'always' for all of them, 'except_last' for
            all but the last one, or 'never' for none.

    Raises:
        ValueError: If no schedule has this name, or the schedule does not fit n, m and v.
    """
    if isinstance(schedule, Schedule):
        _check_fits(schedule, n, m, v)
        lists = recomputing(schedule.lists, m, checkpoint)
        return Schedule(schedule.name, schedule.placement, lists)
    name = ""
    for known in NAMED:
        if known.lower() == str(schedule).lower():
            name = known
    if not name:
        raise ValueError(
            f"no schedule is called {schedule!r}; there are {', '.join(NAMED)}, "
            "or a Schedule of your own"
        )
    maker, only = NAMED[name]
    if v is None:
        v = 2 if only is None else only
    if only not in (None, v) or min(n, m, v) < 1:
        some = ">= 1" if only is None else f"= {only}"
        raise ValueError(
            f"{name} is for n >= 1 devices, m >= 1 and v {some} stages on each, "
            f"not {n}, {m} and {v}"
        )
    devices = list(range(n))
    placement = devices * v
    if name == "ZBVZeroBubble":
        placement = devices + devices[::-1]
    return Schedule(name, placement, recomputing(maker(n, m, v), m, checkpoint))


def _check_fits(schedule: Schedule, n: int, m: int, v: int | None) -> None:
    """Raise `ValueError` if a given schedule is not for n devices, m micro-batches and v stages."""
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


def draw(
    schedule: str | Schedule, n: int, m: int, v: int | None = None, checkpoint: str = "never"
) -> str:
    """Return a picture of a schedule as text; `torchgpipe.schedules.texts` says how to read it.

    Args:
        schedule: A name or a schedule, as for `make`.
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has, as for `make`.
        checkpoint: Which micro-batches are recomputed, as for `make`.
    """
    return str(make(schedule, n, m, v, checkpoint))
