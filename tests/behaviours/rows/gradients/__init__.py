"""Rows (test cases) about gradients: of frozen layers, with hooks, and of unusual backward passes."""

from . import backwards, layers

ROWS = [*layers.ROWS, *backwards.ROWS]
