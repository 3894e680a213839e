"""Test cases about tensors that enter a pipeline, pass between partitions, or leave it.

They vary the tensors, the attributes of tensors, the sizes of batches and partitions, and the skip
connections.
"""

from . import attributes, sizes, skips, structures, tensors

ROWS = [*tensors.ROWS, *attributes.ROWS, *sizes.ROWS, *skips.ROWS, *structures.ROWS]
