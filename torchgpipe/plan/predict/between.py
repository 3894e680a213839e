"""Find skips from one partition to another, and parameters that several partitions share."""

from collections.abc import Sequence

from torchgpipe.plan.count.footprint import LayerCount, Stashed, Tied
from torchgpipe.plan.hardware.hardware import Hardware

Cuts = Sequence[tuple[int, int]]
"""For each partition, the half-open range of its layers: (first, last + 1)."""


def crossing(
    skips: Sequence[tuple[int, int, Stashed]], cuts: Cuts
) -> list[tuple[int, int, Stashed]]:
    """Return the skips that are stashed in one partition and popped in another.

    Each skip is a tuple: the number of the partition that stashes it, the number of the partition
    that pops it, and its bytes.

    Args:
        skips: All skips, each with the layers that stash and pop it (see `list_skips`).
        cuts: The range of layers of each partition.
    """
    partitions: list[int] = []  # of each layer
    for j, (start, stop) in enumerate(cuts):
        partitions += [j] * (stop - start)
    found = []
    for stashing, popping, skip in skips:
        source, target = partitions[stashing], partitions[popping]
        if source != target:
            found.append((source, target, skip))
    return found


def exchanged_parameters(
    layers: Sequence[LayerCount], cuts: Cuts, placement: Sequence[int]
) -> dict[Tied, set[int]]:
    """Map each trained parameter that several devices have to the set of these devices.

    Args:
        layers: The layers of the model.
        cuts: The range of layers of each partition.
        placement: The device of each partition.
    """
    holders: dict[Tied, set[int]] = {}
    for device, (start, stop) in zip(placement, cuts, strict=True):
        for layer in layers[start:stop]:
            for tied in layer.tied:
                if tied.trained:
                    holders.setdefault(tied, set()).add(device)
    return {tied: devices for tied, devices in holders.items() if len(devices) > 1}


def all_reduce(hardware: Hardware, nbytes: float, devices: int) -> float:
    """Return the seconds of an all-reduce, which sums the gradients of several devices.

    In a ring all-reduce, each of k devices sends 2 (k - 1) / k of the gradients' bytes to the next
    device (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009).

    Args:
        hardware: The node.
        nbytes: The bytes of the gradients on each device.
        devices: How many devices have these gradients.
    """
    return 2 * (devices - 1) * hardware.transfer(nbytes / devices)
