"""Let ways to do something take turns, so that what makes the machine slow meets all of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Way = TypeVar("Way")


def turns(
    steps: Mapping[Way, Callable[[], T]], rounds: int, draw: random.Random | None = None, warm_up: int = 0
) -> Iterator[dict[Way, list[T]]]:
    """Run a step of each way per round; yield all samples after each round, without those that warm up.

    The order is drawn for each second round; the round after it has the reverse order, so that no way comes first more
    often.
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
