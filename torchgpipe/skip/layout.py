"""The skip layout: which skips leave one partition for another (torchgpipe paper, section 3.3)."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of


class Crossing(NamedTuple):
    """A skip that leaves partition `source` for partition `target`."""

    key: SkipKey
    source: int
    target: int


def skip_layout(partitions: Iterable[nn.Module], *, portals: bool = True) -> list[Crossing]:
    """Lay out a model's skips over its partitions; those that stay inside of one are not listed.

    With `portals`, a skip goes straight from the partition that stashes it to the one that pops it. Without, it
    travels through every partition between them as one more tensor of the micro-batch.
    """
    origin: dict[SkipKey, int] = {}
    crossings: list[Crossing] = []
    for j, partition in enumerate(partitions):
        stashes, pops = skips_of(partition)
        origin.update(dict.fromkeys(stashes, j))
        for key in pops:
            # The partitions that the skip comes to: a single one if it is stashed and popped in the same.
            stops = range(origin[key], j + 1, max(1, j - origin[key]) if portals else 1)
            crossings += [Crossing(key, source, target) for source, target in pairwise(stops)]
    return crossings
