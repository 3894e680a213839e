"""Tensors go into a pipeline, between its partitions and out of it; skips reach their layer.

The rows vary tensors, their attributes, the sizes of batches and partitions, and skips.
"""

from . import attributes, sizes, skips, tensors

ROWS = [*tensors.ROWS, *attributes.ROWS, *sizes.ROWS, *skips.ROWS]
