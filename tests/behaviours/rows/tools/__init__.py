"""Rows (test cases) with PyTorch's tools for training: with a pipeline, they work or raise errors.

docs/works-with.md shows these rows with their notes. Most of the code that uses the tools is in
examples/works_with.py.
"""

from . import changed_layers, processes, training
from .replicas import REPLICAS

__all__ = ["REPLICAS", "ROWS"]

ROWS = [*training.ROWS, *changed_layers.ROWS, *processes.ROWS]
