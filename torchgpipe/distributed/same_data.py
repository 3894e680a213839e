"""Whether ranks were given the same samples; one rank uses the input, and another one the target.

A script may give (x, target) on every rank. Rank 0 uses its x, and the last rank its target. If a
sampler shuffles differently on each rank, the samples of rank 0 meet labels of other samples. So
the rank of the first stage sends checksums of its input and its target, with the message by which a
mini-batch begins. The rank of the last stage compares them with those of its own data.
"""

import warnings
from typing import Any
from zlib import crc32

from torch import Tensor

from torchgpipe.trace.parts import tensors_in

FIRST, EVERY = 3, 100  # the first three mini-batches are compared, and then each hundredth
READ = 64  # about so many values of each tensor are read


def checksums(serial: int, input: Any, target: Any) -> list[int]:
    """Return a checksum of the input and one of the target.

    Both are 0 if this mini-batch is not compared.

    Args:
        serial: The number of the mini-batch, which is the same on all ranks.
        input: What the rank was given as the input.
        target: What the rank was given as the target.
    """
    if serial > FIRST and serial % EVERY:
        return [0, 0]
    return [_checksum(input), _checksum(target)]


def warn_if_unlike(own: list[int], theirs: list[int], last: int, first: int) -> bool:
    """Warn if the ranks of the first and the last stage were given different data.

    If both were given a target, only the targets are compared: each rank may augment inputs with
    random numbers of its own.

    Args:
        own: The checksums of the rank of the last stage, which calls this.
        theirs: The checksums of the rank of the first stage.
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
    """Return a checksum of all tensors in a value, or 0 if there is nothing to compare."""
    tensors = list(tensors_in(value))
    if any(type(x) is not Tensor or x.device.type != "cpu" for x in tensors):
        return 0
    read: list[list[Any]] = []
    try:
        for x in tensors:
            flat = x.detach().reshape(-1)
            step = len(flat) // READ + 1
            read.append(flat[::step].tolist())
    except RuntimeError:  # values of some types and layouts cannot be read like this
        return 0
    # Empty tensors, zeros and the like stand for data that a rank does not have.
    if all(len({*values}) < 2 for values in read):
        return 0
    return crc32(repr(read).encode())
