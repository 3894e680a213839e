"""The skip layout: which skips enter and leave each partition, and from where (torchgpipe paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of


@dataclass(frozen=True)
class Arrival:
    """A skip that enters a partition, from partition `source`."""

    key: SkipKey
    source: int


@dataclass(frozen=True)
class Departure:
    """A skip that leaves a partition, for partition `target`."""

    key: SkipKey
    target: int


@dataclass(frozen=True)
class PartitionSkips:
    """The skips that cross the boundaries of one partition; those that stay inside are not listed."""

    arrivals: tuple[Arrival, ...]
    departures: tuple[Departure, ...]


def skip_layout(partitions: Sequence[nn.Module], *, portals: bool = True) -> list[PartitionSkips]:
    """Lay out a model's skips over its partitions.

    With `portals`, a skip goes straight from the partition that stashes it to the one that pops it. Without, it
    travels through every partition between them as one more tensor of the micro-batch.
    """
    origin: dict[SkipKey, int] = {}
    arrivals: list[list[Arrival]] = [[] for _ in partitions]
    departures: list[list[Departure]] = [[] for _ in partitions]
    for j, partition in enumerate(partitions):
        stashes, pops = skips_of(partition)
        origin.update(dict.fromkeys(stashes, j))
        for key in pops:
            stops = [origin[key], j] if portals else list(range(origin[key], j + 1))
            for source, target in pairwise(stops):
                if source != target:
                    departures[source].append(Departure(key, target))
                    arrivals[target].append(Arrival(key, source))
    return [PartitionSkips(tuple(a), tuple(d)) for a, d in zip(arrivals, departures, strict=True)]
