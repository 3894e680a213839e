"""Run the partitions of a pipeline in parallel: by threads, by processes or by PyTorch's schedules.

This folder may import `torchgpipe`. Of `reproduce`, it may import the folders below `run`.
"""
