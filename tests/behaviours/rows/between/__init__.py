"""Test cases with PyTorch modes around a pipeline, or with changes between forward and backward.

The modes, such as autocast, must hold for all layers. A recomputation must run under the conditions
of its forward, or raise an error.
"""

from . import changes, modes, passes

ROWS = [*modes.ROWS, *changes.ROWS, *passes.ROWS]
