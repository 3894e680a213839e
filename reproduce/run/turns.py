"""Run different ways to do something in turn, so that slow phases of the machine affect all of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Way = TypeVar("Way")


def turns(
    steps: Mapping[Way, Callable[[], T]], rounds: int, draw: random.Random
) -> Iterator[dict[Way, list[T]]]:
    """Run a step of each way per round; yield all samples after each round.

    Rounds come in pairs: the first has a random order, the second the reverse, so that no way is favoured
    by its place.
    """
    samples: dict[Way, list[T]] = {way: [] for way in steps}
    order: list[Way] = []
    for k in range(rounds):
        order = order[::-1] if k % 2 else draw.sample(list(steps), len(steps))
        for way in order:
            samples[way].append(steps[way]())
        yield samples
