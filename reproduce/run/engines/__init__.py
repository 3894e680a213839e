"""Run the partitions of a pipeline in parallel: by threads, processes, or PyTorch's schedules."""
