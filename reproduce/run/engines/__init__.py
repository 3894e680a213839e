"""What runs partitions in parallel: threads, ranks, PyTorch's schedules, and the processes of the last two.
It may import `torchgpipe`, and of `reproduce` what lies below `run`."""
