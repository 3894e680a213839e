"""Backward through frozen layers and hooks, from parts of the outputs, twice, and in any order."""

from . import backwards, layers

ROWS = [*layers.ROWS, *backwards.ROWS]
