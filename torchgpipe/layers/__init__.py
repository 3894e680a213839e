"""Split the layers of a pipeline into partitions, check them, and place them on devices."""
