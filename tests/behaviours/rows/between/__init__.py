"""Modes around a pipeline, and changes between its passes.

Modes reach the layers. A recomputation finds what its first pass found, or raises an error.
"""

from . import changes, modes, passes

ROWS = [*modes.ROWS, *changes.ROWS, *passes.ROWS]
