"""Check the layers of a pipeline, split them into partitions, and move these to their devices."""
