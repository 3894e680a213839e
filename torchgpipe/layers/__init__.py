"""The layers of a pipeline: split into partitions, checked, and placed on devices."""
