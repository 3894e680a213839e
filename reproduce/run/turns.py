"""Call several functions alternately, so that slow phases of the machine affect all of them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Way = TypeVar("Way")


def turns(
    steps: Mapping[Way, Callable[[], T]], rounds: int, draw: random.Random
) -> Iterator[dict[Way, list[T]]]:
    """Call functions in rounds. After each round, yield a dictionary of all results so far.

    The dictionary maps the name of each function to the list of its results.

    In a round, each function is called once. Rounds come in pairs: the first round of a pair has a
    random order, and the second round has the reverse order. So the order favours no function.

    Args:
        steps: Maps names to the functions.
        rounds: The number of rounds.
        draw: The generator of the random orders.
    """
    ways = list(steps)
    samples: dict[Way, list[T]] = {way: [] for way in ways}
    order: list[Way] = []
    for k in range(rounds):
        if k % 2 == 0:
            order = draw.sample(ways, len(ways))
        else:
            order.reverse()
        for way in order:
            sample = steps[way]()
            samples[way].append(sample)
        yield samples
