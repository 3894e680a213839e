"""Check that the skips of a model match, and find the skips that cross partitions.

A portal sends a skip directly to the partition that pops it. Portals are described in section 3.3
of the torchgpipe paper.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of


class Crossing(NamedTuple):
    """A skip that is sent from partition `source` to partition `target`."""

    key: SkipKey
    source: int
    target: int


def skip_layout(partitions: Iterable[nn.Module], *, portals: bool = True) -> list[Crossing]:
    """Return the skips that cross partitions, each with its source and target partition.

    Skips within one partition are left out.

    Args:
        partitions: The model's partitions, in order.
        portals: Whether a skip is sent directly from the partition that stashes it to the partition
            that pops it. Otherwise each partition sends the skip to the next partition, as an
            additional tensor of the micro-batch.
    """
    origins: dict[SkipKey, int] = {}
    crossings: list[Crossing] = []
    for j, partition in enumerate(partitions):
        stashes, pops = skips_of(partition)
        for key in stashes:
            origins[key] = j
        for key in pops:
            origin = origins[key]
            if origin == j:
                continue
            stops = [origin, j] if portals else range(origin, j + 1)
            for source, target in pairwise(stops):
                crossings.append(Crossing(key, source, target))
    return crossings


def verify_skippables(module: nn.Sequential) -> None:
    """Check that the skips of a sequence of layers match.

    Exactly one layer has to stash each skip, and exactly one later layer has to pop it. If a model
    uses a class several times, `layer.isolate(namespace)` tells the layers' skips apart.

    Raises:
        TypeError: If skips do not match. The message lists every mismatch.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    for name, layer in module.named_children():
        stashes, pops = skips_of(layer)
        for key in stashes:
            if key in stashed:
                other = stashed[key]
                faults.append(
                    f"layer {name!r} stashes {key}, which layer {other!r} stashed already"
                )
            else:
                stashed[key] = name
        for key in pops:
            if key in popped:
                other = popped[key]
                faults.append(f"layer {name!r} pops {key}, which layer {other!r} popped already")
                continue
            if key not in stashed:
                faults.append(f"layer {name!r} pops {key}, which no earlier layer stashes")
            popped[key] = name
    for key, name in stashed.items():
        if key not in popped:
            faults.append(f"layer {name!r} stashes {key}, which no later layer pops")
    if faults:
        raise TypeError(
            f"skips do not match: {'; '.join(faults)}; if a class is used more than once, give "
            "each pair of layers (one stashes, one pops) its own namespace: ns = Namespace(); "
            "layer.isolate(ns)"
        )
