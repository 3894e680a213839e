"""Test cases about random numbers and norms.

A recomputation must draw the random numbers of its forward again, and must not update running
statistics a second time. The plain layers, which run without a pipeline, cannot draw the same
numbers as a pipeline. Instead, they use the numbers that `Draw` layers (../../parts/draw.py) have
recorded in the pipeline.
"""

from . import draws, norms

ROWS = [*draws.ROWS, *norms.ROWS]
