"""Search for the setup with the shortest predicted step that fits every device's memory.

A setup has a schedule, a number of devices, a number of micro-batches, a checkpoint mode and a
balance. The first four of these together are called a choice here. For each choice, the search
looks for the fastest balance. The result is the fastest setup for each schedule and number of
devices. The search has these steps:

1. For each choice, compute a lower bound on the step time of all balances (see `balances`).
2. Try the choices in turn, the one with the lowest bound first. Skip a choice if its bound shows
   that it cannot be faster than the best setup so far with the same schedule and number of devices.
3. For each choice, begin with a balance whose partitions take about equal time. If this balance
   does not fit the memory, also try balances whose partitions take about equal memory.
4. If the step time of this balance is near that of the best setup so far, move layers from
   partition to partition as long as this makes the predicted step shorter (see `trial`).

For every setup in the result, the timeline and the memory of a step were predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup, micro_batch_sizes
from torchgpipe.plan.search.balances import Work, heaviest, held_by_layers
from torchgpipe.plan.search.impossible import Impossible, least, why
from torchgpipe.plan.search.trial import MOST_TASKS, Candidate, Choices, Trial, assess

BYTES = (0.5, 1.0)
"""The weights of bytes, against seconds, in balances that divide a sum of bytes and seconds evenly.

These balances are tried if the memory is too small for a balance by seconds, and at the end.
"""
CLOSE = 1e-3
"""A setup is good enough if its step is longer than the bound by at most this share."""
NEAR = 0.02
"""Layers are moved only if the first balance is slower than the best by less than this share."""


def unheard(line: str) -> None:
    """Tell nobody about the progress."""


class Aim(NamedTuple):
    """The goal of a search, and the function to which the search reports its progress.

    Attributes:
        memory: How many bytes tensors may take on each device.
        close: A setup is good enough if its step is longer than the lower bound by at most this
            share: 0.01 means 1 %. If the share is infinite, any setup that fits is good enough.
        progress: A function that is called again and again with a line of text, which says how far
            the search is.
    """

    memory: float
    close: float = CLOSE
    progress: Callable[[str], object] = unheard


@dataclass
class Found:
    """The result of a search for one number of devices, with one schedule or with all schedules.

    Attributes:
        best: The best setup, or `None` if no setup fits.
        bound: A lower bound on the seconds of a step with any setup that fits.
        unlimited: The seconds of the fastest setup whose partitions take equal time, even if that
            setup does not fit the memory.
    """

    best: Candidate | None = None
    bound: float = inf
    unlimited: float = inf

    @property
    def limit(self) -> float:
        """The seconds of a step with the best setup, or infinity if no setup fits."""
        return inf if self.best is None else self.best.seconds


def chunk_choices(batch_size: int) -> list[int]:
    """Return all numbers of micro-batches into which `torch.chunk` can split a mini-batch.

    `torch.chunk` cannot make every number, because its chunks have equal sizes. The list has at
    most 2 * sqrt(`batch_size`) numbers.
    """
    choices = set()
    for size in range(1, batch_size + 1):
        chunks = -(-batch_size // size)
        choices.add(len(micro_batch_sizes(batch_size, chunks)))
    return sorted(choices)


def search(
    predictor: Predictor, choices: Choices, partitions: Sequence[int], aim: Aim
) -> list[dict[int, Found]]:
    """Find the fastest setup that fits the memory, for each schedule and each number of devices.

    A setup also has a balance, a number of micro-batches and a checkpoint mode.

    Args:
        predictor: The predictor of the model.
        choices: The schedules, checkpoint modes and numbers of micro-batches to choose from. If any
            number of micro-batches is allowed, those of `chunk_choices` are tried.
        partitions: The numbers of devices to choose from.
        aim: The memory that a setup must fit, and when a setup is good enough.

    Returns:
        A list with a dictionary for each schedule, in the order of the choices. The dictionary maps
        each number of devices to a `Found`, which has the fastest setup for this number.

    Raises:
        Impossible: If no setup fits. The message says why.
    """
    schedules = choices.schedules
    found = []
    for schedule in schedules:
        own = {n: Found() for n in partitions}
        _search_one(own, predictor, choices._replace(schedules=[schedule]), aim)
        found.append(own)
    if all(each.best is None for each in merged(found).values()):
        n = max(partitions)
        smallest = least(predictor, n, choices)
        if smallest.peak > aim.memory:
            raise Impossible(why(predictor, smallest, choices.batch_size, n, aim.memory))
        found[schedules.index(smallest.setup.schedule)][n].best = smallest
    for own in found:
        for n, each in own.items():
            each.bound = min(each.bound, each.limit)
            if each.best is not None and each.limit > each.bound * (1 + aim.close):
                _finish(each, n, Work(predictor, each.best.setup), aim)
    return found


def merged(found: Sequence[Mapping[int, Found]]) -> dict[int, Found]:
    """Combine the results for all schedules: return the best one for each number of devices."""
    best = {}
    for n in found[0]:
        each = [own[n] for own in found]
        fastest = min(each, key=lambda one: one.limit)
        bound = min([one.bound for one in each])
        unlimited = min([one.unlimited for one in each])
        best[n] = Found(fastest.best, bound, unlimited)
    return best


def _search_one(found: dict[int, Found], predictor: Predictor, choices: Choices, aim: Aim) -> None:
    """Search with one schedule, and store the best setup for each number of devices in `found`.

    The keys of `found` are the numbers of devices. The schedule is the only one in `choices`.
    """
    batch_size, optimizer, chunks, checkpoint, (schedule,) = choices
    base = Setup(batch_size, (len(predictor.counts),), optimizer=optimizer, schedule=schedule)
    kept = sum(held_by_layers(predictor.counts.once, optimizer))
    roomy = [n for n in found if kept <= n * aim.memory]
    numbers = sorted(set(chunks or chunk_choices(batch_size)))
    works = []
    for m, mode in product(numbers, checkpoint):
        # With one micro-batch, `except_last` is the same as `never`.
        if mode != "except_last" or m > 1 or "never" not in checkpoint:
            setup = replace(base, chunks=m, checkpoint=mode)
            works.append(Work(predictor, setup))
    asked = _in_order(works, roomy)
    for k, (lower, n, work) in enumerate(asked):
        name = schedule if isinstance(schedule, str) else schedule.name
        aim.progress(f"searching with {name}: choice {k} of {len(asked)}")
        bound = lower
        few = 3 * len(work.setup.sizes) * n <= MOST_TASKS
        if found[n].limit > lower * (1 + aim.close) and (chunks or few):
            bound = _try(found[n], n, work, aim)
        found[n].bound = min(found[n].bound, bound)


def _in_order(works: Sequence[Work], partitions: Sequence[int]) -> list[tuple[float, int, Work]]:
    """Return all choices of one schedule, the choice with the lowest bound first.

    Args:
        works: A `Work` for each number of micro-batches and each checkpoint mode to choose from.
        partitions: The numbers of devices to choose from.

    Returns:
        Tuples: the lower bound on the seconds of a step, the number of devices, and the `Work`.
    """
    asked: list[tuple[float, int, Work]] = []
    for work in works:
        layers = len(work.seconds)
        for n in partitions:
            stages = work.stages(n)
            if 0 < stages <= layers:
                asked.append((work.bound(n), n, work))
    return sorted(asked, key=lambda each: each[0])


def _try(found: Found, n: int, work: Work, aim: Aim) -> float:
    """Look for a faster setup among the balances on `n` devices, and store it in `found`.

    Return a lower bound on the seconds of a step with any balance that fits the memory. The bound
    is infinite if no balance fits.
    """
    setup = replace(work.setup, balance=work.balance(n, 0.0))
    step = work.predictor.step(setup)
    found.unlimited = min(found.unlimited, step.seconds)
    if heaviest(work.held, work.balance(n, 1.0)) > aim.memory:
        return inf
    lower = work.bound(n, heaviest(work.seconds, setup.balance))
    trial = Trial(work, assess(work.predictor, setup, step), aim.memory)
    if found.best is not None and len(found.best.setup.balance) == len(setup.balance):
        trial.take(found.best.setup.balance)
    if trial.lacking:
        for share in BYTES:
            trial.take(work.balance(n, share))
    if trial.best.seconds < found.limit * (1 + NEAR):
        _improve(found, trial, lower * (1 + aim.close))
    return lower


def _finish(found: Found, n: int, work: Work, aim: Aim) -> None:
    """Search again from balances that divide the memory evenly, which can find a faster setup.

    Args:
        found: The best setup so far, which is replaced by a faster one.
        n: How many devices there are.
        work: The setup, with the seconds and bytes of its layers.
        aim: The memory that a setup must fit, and when a setup is good enough.
    """
    for share in BYTES:
        setup = replace(work.setup, balance=work.balance(n, share))
        trial = Trial(work, assess(work.predictor, setup), aim.memory)
        _improve(found, trial, found.bound * (1 + aim.close))


def _improve(found: Found, trial: Trial, enough: float) -> None:
    trial.improve(enough)
    if not trial.lacking and trial.best.seconds < found.limit:
        found.best = trial.best
