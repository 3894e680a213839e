"""Run the partitions of a pipeline in parallel: by threads, by processes or by PyTorch's schedules.

This folder may import `torchgpipe` and `run.failure`. Of the rest of `reproduce`, it may import the
folders that `run` may import.
"""
