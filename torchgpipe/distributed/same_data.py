"""Check that the first and the last rank were given the same samples.

A script can pass (x, target) on every rank, but only rank 0 uses its x, and only the last rank uses
its target. If a sampler shuffles differently on each rank, samples get the labels of other samples.
To detect this, the rank of the first stage sends checksums of its input and its target, in the
first message of a mini-batch. The rank of the last stage compares them with checksums of its data.
"""

import warnings
from typing import Any
from zlib import crc32

from torch import Tensor

from torchgpipe.trace.parts import tensors_in

FIRST, EVERY = 3, 100  # the first 3 mini-batches are compared, and then every 100th mini-batch

READ = 64  # about how many values of each tensor are read


def checksums(serial: int, input: Any, target: Any) -> list[int]:
    """Return a checksum of the input and a checksum of the target.

    Ranks compare only the first mini-batches, and then every 100th. For all other mini-batches,
    return zeros.

    Args:
        serial: The number of the mini-batch, which is the same on all ranks.
        input: The input on this rank.
        target: The target on this rank.
    """
    if serial > FIRST and serial % EVERY:
        return [0, 0]
    return [_checksum(input), _checksum(target)]


def warn_if_unlike(own: list[int], theirs: list[int], last: int, first: int) -> bool:
    """Warn if the ranks of the first and the last stage were given different data.

    If both ranks were given a target, only the targets are compared, because the data augmentation
    of inputs can draw different random numbers on each rank.

    Args:
        own: The checksums of this rank, which has the last stage.
        theirs: The checksums of the other rank, which has the first stage.
        last: The rank of the last stage.
        first: The rank of the first stage.

    Returns:
        Whether the data differ.
    """
    what, pair = "target", (own[1], theirs[1])
    if 0 in pair:
        what, pair = "input", (own[0], theirs[0])
    one, other = pair
    differ = 0 not in pair and one != other
    if differ:
        warnings.warn(
            f"rank {first} and rank {last} were given different {what}s for the same mini-batch; "
            f"the input of rank {first} is used with the target of rank {last}, so samples may "
            "have wrong labels; let the data loaders of all ranks draw the same samples in the "
            f"same order, or give None where a rank needs no {what}",
            stacklevel=2,
        )
    return differ


def _checksum(value: Any) -> int:
    """Return a checksum of all tensors in a value, or 0 if the value has no tensors."""
    tensors = list(tensors_in(value))
    if any(type(x) is not Tensor or x.device.type != "cpu" for x in tensors):
        return 0
    read: list[list[Any]] = []
    try:
        for x in tensors:
            flat = x.detach().reshape(-1)
            step = len(flat) // READ + 1
            read.append(flat[::step].tolist())
    except RuntimeError:  # values of some types and layouts cannot be read in this way
        return 0
    # An empty tensor, or a tensor with equal values, means that the rank does not have the data.
    if all(len({*values}) < 2 for values in read):
        return 0
    return crc32(repr(read).encode())
