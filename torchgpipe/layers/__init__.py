"""Check the layers of a pipeline, split them into partitions, and place the partitions."""
