"""Rows (test cases) with PyTorch modes around a pipeline, or changes between forward and backward.

Modes take effect in the layers. A recomputation runs under the conditions of the first forward
pass, or raises an error.
"""

from . import changes, modes, passes

ROWS = [*modes.ROWS, *changes.ROWS, *passes.ROWS]
