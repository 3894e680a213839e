"""PyTorch's tools around a training: each works as without a pipeline, or is refused.

docs/works-with.md shows these rows with their notes. The code that uses the tools is for the most
part in examples/works_with.py, which that page links to.
"""

from . import changed_layers, processes, training
from .replicas import REPLICAS

__all__ = ["REPLICAS", "ROWS"]

ROWS = [*training.ROWS, *changed_layers.ROWS, *processes.ROWS]
