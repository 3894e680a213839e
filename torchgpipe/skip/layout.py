"""The skips of a whole model: are they in pairs, and which leave one partition for another (torchgpipe paper, 3.3)?"""

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


def verify_skippables(module: nn.Sequential) -> None:
    """Check the skips of a sequence of layers; raise `TypeError` that lists every fault.

    Each skip has to be stashed by one layer and popped by one later layer. Where a class is used several times,
    `layer.isolate(Namespace())` keeps its skips apart.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: dict[SkipKey, str] = {}
    for name, layer in module.named_children():
        stashes, pops = skips_of(layer)
        for key in stashes:
            if key in stashed:
                faults.append(
                    f"layer {name!r} stashes {key}, which layer {stashed[key]!r} stashed already"
                )
            stashed.setdefault(key, name)
        for key in pops:
            if key in popped:
                faults.append(
                    f"layer {name!r} pops {key}, which layer {popped[key]!r} popped already"
                )
            elif key not in stashed:
                faults.append(f"layer {name!r} pops {key}, which no earlier layer stashes")
            popped.setdefault(key, name)
    faults += [
        f"layer {name!r} stashes {key}, which no later layer pops"
        for key, name in stashed.items()
        if key not in popped
    ]
    if faults:
        raise TypeError(
            "skips do not match:\n"
            + "\n".join(f"- {fault}" for fault in faults)
            + "\nA class used more than once needs a namespace for each pair: layer.isolate(Namespace())"
        )
