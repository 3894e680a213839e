"""Test cases with PyTorch modes around a pipeline, or with changes between forward and backward.

Layers must see the modes. A recomputation must run under the same conditions as the first forward
pass, or raise an error.
"""

from . import changes, modes, passes

ROWS = [*modes.ROWS, *changes.ROWS, *passes.ROWS]
