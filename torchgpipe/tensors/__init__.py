"""Micro-batches, what tasks hand on, copies between devices, observers, checkpoint flags, PyTorch's private autograd.

It may import `torchgpipe.skip`.
"""
