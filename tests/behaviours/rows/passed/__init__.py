"""Rows (test cases) about tensors that go into a pipeline, between partitions, and out of it.

The rows vary the tensors, the attributes of tensors, the sizes of batches and partitions, and the
skip connections.
"""

from . import attributes, sizes, skips, tensors

ROWS = [*tensors.ROWS, *attributes.ROWS, *sizes.ROWS, *skips.ROWS]
