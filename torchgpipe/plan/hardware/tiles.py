"""What it costs that a device computes products of matrices in whole tiles, on a number of processors.

Libraries cut what a product puts out into tiles of fixed sizes, and each is one processor's work. A tile that sticks
out over the edge takes as long as a full one, and so does the last round, in which some processors have none.
"""

import functools
import math
from typing import NamedTuple

TILES = ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128))
"""The sizes that are tried: those in the names of cuDNN's and cuBLAS's kernels in float32 (`..._128x64_...`)."""


class Grid(NamedTuple):
    """What an operator's products put out: a number of `matrices` of `rows` by `columns`."""

    rows: float
    columns: float
    matrices: int = 1
    divisible: bool = False
    """Whether processors can also share the sums of one tile, so that no round has too few."""


@functools.lru_cache(maxsize=1 << 16)
def excess(grid: Grid, processors: int) -> float:
    """Return how many times longer than its multiplications a product takes, with the best size of tiles."""
    least = math.inf
    for rows, columns in TILES:
        tiles = grid.matrices * math.ceil(grid.rows / rows) * math.ceil(grid.columns / columns)
        busy = tiles if grid.divisible else math.ceil(tiles / processors) * processors
        least = min(least, busy * rows * columns / (grid.matrices * grid.rows * grid.columns))
    return least
