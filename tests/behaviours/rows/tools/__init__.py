"""Rows (test cases) with PyTorch's tools for training, such as `DistributedDataParallel`.

With a pipeline, a tool works like without a pipeline, or the pipeline raises an error.

docs/works-with.md shows these rows with their notes. Most of the code that uses the tools is in
examples/works_with.py.
"""

from . import changed_layers, processes, training
from .replicas import REPLICAS

__all__ = ["REPLICAS", "ROWS"]

ROWS = [*training.ROWS, *changed_layers.ROWS, *processes.ROWS]
