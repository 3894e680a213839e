"""Run partitions in parallel: by threads, by ranks or by PyTorch's schedules.

It may import `torchgpipe`, and of `reproduce` what lies below `run`.
"""
