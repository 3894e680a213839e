"""Test cases with PyTorch's tools for training, such as `DistributedDataParallel`.

With a pipeline, a tool must work as it does without a pipeline, or the pipeline must raise an
error. docs/works-with.md has a table of these test cases. Most of the code that uses the tools is
in examples/works_with.py.
"""

from . import changed_layers, processes, scripted, traced, training
from .replicas import REPLICAS

__all__ = ["REPLICAS", "ROWS"]

ROWS = [
    *training.ROWS,
    *changed_layers.ROWS,
    *processes.ROWS,
    *scripted.ROWS,
    *traced.ROWS,
]
