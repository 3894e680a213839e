"""Run different ways to do something in turn, so that slow phases of the machine affect all of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Way = TypeVar("Way")


def turns(
    steps: Mapping[Way, Callable[[], T]], rounds: int, draw: random.Random | None = None, warm_up: int = 0
) -> Iterator[dict[Way, list[T]]]:
    """Run a step of each way per round; yield all samples after each round, without warm-up rounds.

    Rounds come in pairs: the first has a random order, the second the reverse, so that no way is favoured
    by its place.
    """
    draw = draw or random.Random(0)
    samples: dict[Way, list[T]] = {way: [] for way in steps}
    order: list[Way] = []
    for k in range(warm_up + rounds):
        order = order[::-1] if k % 2 else draw.sample(list(steps), len(steps))
        for way in order:
            sample = steps[way]()
            if k >= warm_up:
                samples[way].append(sample)
        if k >= warm_up:
            yield samples
