"""Whether ranks were given the same samples: one rank uses the input, and another one the target.

A script may give (x, target) on every rank. Rank 0 uses its x, and the last rank its target. With a
sampler that shuffles otherwise on each rank, samples of one meet labels of the other. So the first
stage's rank sends checksums of both, with what it tells all others when a mini-batch begins. The
last stage's rank compares them with those of what it was given itself.
"""

import warnings
from contextlib import suppress
from typing import Any
from zlib import crc32

from torch import Tensor

from torchgpipe.trace.parts import tensors_in

FIRST, EVERY = 3, 100  # the first three mini-batches are compared, and then each hundredth
READ = 64  # about so many values of each tensor are read


def checksums(serial: int, input: Any, target: Any) -> list[int]:
    """Return a checksum of the input and one of the target; both are 0 if this mini-batch is not compared.

    `serial` is the number of the mini-batch, which all ranks count alike.
    """
    if serial > FIRST and serial % EVERY:
        return [0, 0]
    return [_checksum(input), _checksum(target)]


def warn_if_unlike(own: list[int], theirs: list[int], last: int, first: int) -> bool:
    """Warn on rank `last`, whose checksums are `own`, if rank `first` has other data.

    Return whether it has. Where both have a target, that alone decides: inputs may be augmented at
    random on each rank.
    """
    what, pair = "target", (own[1], theirs[1])
    if 0 in pair:
        what, pair = "input", (own[0], theirs[0])
    differ = 0 not in pair and pair[0] != pair[1]
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
    tensors = [*tensors_in(value)]
    if any(type(x) is not Tensor or x.device.type != "cpu" for x in tensors):
        return 0
    read: list[list[Any]] = []
    with suppress(RuntimeError):  # of types and layouts whose values cannot be read so
        flat = [x.detach().reshape(-1) for x in tensors]
        read = [x[:: len(x) // READ + 1].tolist() for x in flat]
    # Empty tensors, zeros and the like stand for data that a rank does not have.
    if all(len({*values}) < 2 for values in read):
        return 0
    return crc32(repr(read).encode())
