"""Well-known schedules by name, for any number of devices and micro-batches.

`torch.distributed.pipelining` uses the same names, except ZBH1 and ZBH2, which come from the Zero
Bubble paper (arXiv:2401.10241). Each schedule has a function that returns one list of actions for
each device, given n devices, m micro-batches and v stages on each device. The docstring of
`torchgpipe.schedules.texts` explains how to read the pictures here.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import chain, zip_longest

from torchgpipe.schedules.action import LETTERS, Action, Kind, needs
from torchgpipe.schedules.check import Lists
from torchgpipe.schedules.schedule import Schedule, with_recomputations


def looped(
    n: int, m: int, v: int, ahead: Callable[[int], int], backward: Kind = "backward"
) -> list[list[Action]]:
    """Return lists in which devices do some forwards, and then alternate forwards and backwards.

    1. Micro-batches form groups of n. A device does the forwards of a group on its first stage,
       then on its second stage, and so on; then the forwards of the next group. It does the
       backwards in the same way, but begins with its last stage.
    2. Device d begins with `ahead(d)` forwards. Then it alternates forwards and backwards, as long
       as there are any of both.
    3. If m is not a multiple of n, fewer than n micro-batches are left for the last group. It is
       planned with n, and the actions of those that do not exist are removed.

    Larger groups would make the bubble smaller. But devices would need buffers for more than one
    activation or gradient between them.

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has. Device d has the stages d, d + n, d + 2n and so on.
        ahead: A function that returns how many forwards device d does before it alternates.
        backward: The kind of the backward actions.
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
    """Return each device's list of actions in GPipe (arXiv:1811.06965).

    Each device does all forwards and then all backwards. The backwards start with the last
    micro-batch. In the picture, each row is a device, 0 is the forward of micro-batch 0, and B0 is
    its backward. A dot means that the device waits::

        0 | 0 1 2 3 . . . . . . B3  B2  B1  B0
        1 | . 0 1 2 3 . . . B3  B2  B1  B0
        2 | . . 0 1 2 3 B3  B2  B1  B0

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has; this schedule has one, whatever `v` is.
    """
    lists = []
    for actions in looped(n, m, 1, lambda d: m):
        forwards, backwards = actions[:m], actions[m:]
        lists.append([*forwards, *reversed(backwards)])
    return lists


def interleaved(n: int, m: int, v: int) -> Lists:
    """Return each device's list of actions in 1F1B, or in interleaved 1F1B if v > 1.

    Each backward runs as soon as possible. In 1F1B (arXiv:2006.09503), device d keeps the
    activations of at most n - d micro-batches. In the pictures, each row is a device, 0 is the
    forward of micro-batch 0, B0 is its backward, and a dot is a wait::

        0 | 0 1 2 . . . . B0  3 B1  . B2  . B3
        1 | . 0 1 . . B0  2 B1  3 B2  . B3
        2 | . . 0 B0  1 B1  2 B2  3 B3

    With several stages on each device, the bubble is smaller (arXiv:2104.04473). The letters a and
    b are the first and the second stage of the device::

        0 | 0a 1a 0b 1b 2a .  B0b   3a B1b   2b B0a   3b B1a   .  B2b   .  B3b   B2a   B3a
        1 | .  0a 1a 0b B0b   1b B1b   2a B0a   3a B1a   2b B2b   3b B3b   B2a   B3a

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has.
    """
    per_device = 1 if v == 1 else 2  # how many more forwards a device begins with than the next one
    return looped(n, m, v, lambda d: (v - 1) * n + per_device * (n - 1 - d))


def fill(lists: Lists, most: int) -> Lists:
    """Add backwards of weights to lists of actions, at times when devices would wait without them.

    No other action waits for a backward of weights, so it can run late. The function replays the
    lists: each action takes one unit of time. If a device has to wait in a unit, it does the oldest
    backward of weights that it has not done yet.

    Args:
        lists: For each device, its forwards and its backwards of inputs.
        most: A device keeps the activations of at most this many tasks. A device at this limit does
            a backward of weights before its next forward.
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
    """Return each device's list of actions in ZB-H1 of the Zero Bubble paper (arXiv:2401.10241).

    ZB-H1 is 1F1B with backwards that are split into halves: I0 computes the gradients of inputs for
    micro-batch 0, and W0 those of weights. A device does a backward of weights when it otherwise
    waits, or when it already keeps the activations of n micro-batches. In the picture, each row is
    a device, 0 is the forward of micro-batch 0, and a dot is a wait::

        0 | 0  1  2  .  .  I0 W0 3  I1 W1 I2 W2 I3 W3
        1 | .  0  1  .  I0 2  I1 W0 3  I2 W1 I3 W2 W3
        2 | .  .  0  I0 1  I1 2  I2 W0 3  I3 W1 W2 W3

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has; this schedule has one, whatever `v` is.
    """
    lists = looped(n, m, 1, lambda d: n - 1 - d, "backward_inputs")
    return fill(lists, n)


def zb_h2(n: int, m: int, v: int) -> Lists:
    """Return each device's list of actions in ZB-H2 of the Zero Bubble paper (arXiv:2401.10241).

    ZB-H2 is ZB-H1 with more forwards before the first backward: up to 2n - 1 instead of n. If there
    are enough micro-batches, devices wait only at the start and at the end. But a device keeps the
    activations of up to 2n - 1 micro-batches. In the picture, each row is a device. For micro-batch
    0, 0 is the forward, I0 computes the gradients of inputs, and W0 those of weights. A dot is a
    wait::

        0 | 0  1  2  3  .  I0 W0 I1 W1 I2 W2 I3 W3
        1 | .  0  1  2  I0 3  I1 W0 I2 W1 I3 W2 W3
        2 | .  .  0  I0 1  I1 2  I2 3  I3 W0 W1 W2 W3

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has; this schedule has one, whatever `v` is.
    """
    lists = looped(n, m, 1, lambda d: 2 * (n - 1 - d), "backward_inputs")
    return fill(lists, 2 * n - 1)


def zb_v(n: int, m: int, v: int) -> Lists:
    """Return each device's list of actions in ZB-V, which has two stages on each device.

    Each micro-batch goes from the first device to the last one, and then back to the first one. A
    device keeps no more activations than in 1F1B. With at least 2n - 1 micro-batches, a device
    waits only at the start and at the end. In the picture, each row is a device. For micro-batch 0
    on the device's first stage, 0a is the forward, I0a computes the gradients of inputs, and W0a
    those of weights. The letter b is for its second stage, and a dot is a wait::

        0 | 0a  1a  2a  0b  I0b W0b 1b  I1b W1b I0a W0a 2b  I2b W2b I1a W1a I2a W2a
        1 | .   0a  0b  1a  1b  I0b W0b 2a  I0a W0a 2b  I1b W1b I1a I2b I2a W1a W2b W2a

    Args:
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has; this schedule has two, whatever `v` is.
    """
    last = 2 * n - 1  # the last stage, and the fewest micro-batches for which devices never wait
    steady = m >= last
    lists: list[list[Action]] = []
    for d in range(n):
        # Each letter stands for an action on the next micro-batch; `LETTERS` lists the kinds. An
        # upper-case letter is for the device's first stage, a lower-case letter for its second.
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
"""A function that returns each device's list, given n devices, m micro-batches and v stages."""

# Maps each schedule's name to the function that makes its lists of actions, and to the number of
# stages on each device. The number is `None` if the schedule supports any number of stages.
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
    """Return the schedule with a given name, or shorten a given schedule to m micro-batches.

    Args:
        schedule: A name, in lower or upper case, or a schedule for at least m micro-batches.
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has. The default is the number that the schedule needs, or 2
            if any number is possible.
        checkpoint: Which micro-batches are recomputed: 'always' for all of them, 'except_last' for
            all but the last one, or 'never' for none.

    Raises:
        TypeError: If n, m or v is not a whole number.
        ValueError: If no schedule has this name, or the schedule does not fit n, m and v.
    """
    for letter, number in {"n": n, "m": m, "v": v}.items():
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{letter} must be a whole number, but got {number!r}")
    if isinstance(schedule, Schedule):
        _check_fits(schedule, n, m, v)
        lists = with_recomputations(schedule.lists, m, checkpoint)
        return Schedule(schedule.name, schedule.placement, lists)
    name = ""
    for known in NAMED:
        if known.lower() == str(schedule).lower():
            name = known
    if not name:
        raise ValueError(
            f"no schedule is called {schedule!r}: use one of {', '.join(NAMED)}, "
            "or a Schedule that you have made"
        )
    maker, only = NAMED[name]
    if v is None:
        v = 2 if only is None else only
    if only not in (None, v) or min(n, m, v) < 1:
        some = ">= 1" if only is None else f"= {only}"
        raise ValueError(
            f"the schedule {name} needs n >= 1 devices, m >= 1 micro-batches and v {some} stages "
            f"on each device, but got n = {n}, m = {m} and v = {v}"
        )
    devices = list(range(n))
    placement = devices * v
    if name == "ZBVZeroBubble":
        placement = devices + devices[::-1]
    return Schedule(name, placement, with_recomputations(maker(n, m, v), m, checkpoint))


def _check_fits(schedule: Schedule, n: int, m: int, v: int | None) -> None:
    """Raise `ValueError` if a schedule does not fit n devices of v stages, or m micro-batches."""
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
    """Return a picture of a schedule as text; `torchgpipe.schedules.texts` explains the picture.

    Args:
        schedule: A name or a schedule, as for `make`.
        n: How many devices there are.
        m: How many micro-batches there are.
        v: How many stages each device has, as for `make`.
        checkpoint: Which micro-batches are recomputed, as for `make`.
    """
    return str(make(schedule, n, m, v, checkpoint))
