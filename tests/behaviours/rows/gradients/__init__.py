"""Test cases about gradients: frozen layers, hooks, and unusual backward passes."""

from . import backwards, layers

ROWS = [*layers.ROWS, *backwards.ROWS]
