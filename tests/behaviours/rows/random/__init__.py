"""Rows (test cases) about random numbers and norms.

A recomputation draws the random numbers of its forward, and does not update running statistics
again. The layer `Draw` (../../parts/draw.py) records the random numbers of first forward passes,
and the plain layers (the same layers without a pipeline) use these numbers.
"""

from . import draws, norms

ROWS = [*draws.ROWS, *norms.ROWS]
