"""Find the best way to cut layers into partitions, given what each partition would cost: by dynamic programming.

`costs[a, b]` is of the partition from cut a to cut b, infinite where there can be none. All starts and ends are worked
out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

__all__ = ["Path", "lightest"]

Path = list[int]


def lightest(costs: Sequence[Tensor], most: float = inf) -> tuple[float, Path]:
    """Return the least that the largest cost can be, and cuts that reach it; infinity where it would be above `most`.

    `costs` has a table for each partition.
    """
    best, came = costs[0][0], []
    for table in costs[1:]:
        within = torch.nonzero((best <= most) & (best < inf))
        if not len(within):
            return inf, []
        first, end = int(within[0]), int(within[-1]) + 1
        best, by = torch.maximum(best[first:end, None], table[first:end]).min(0)
        came.append(by + first)
    return float(best[-1]), _path(came, len(best) - 1)


def _path(came: Sequence[Tensor], end: int) -> Path:
    """Return the cuts from the first to the last, by where each partition's best came from."""
    cuts = [end]
    for by in reversed(came):
        cuts.append(int(by[cuts[-1]]))
    return [0, *reversed(cuts)]
