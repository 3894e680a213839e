"""Random numbers and norms: a recomputation draws what its forward drew, and counts nothing twice.

`Draw` (../../parts/draw.py) records what first passes drew, and the plain layers use these numbers.
"""

from . import draws, norms

ROWS = [*draws.ROWS, *norms.ROWS]
