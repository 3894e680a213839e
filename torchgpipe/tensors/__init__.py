"""Tensors that tasks hand on: micro-batches, skips and copies; and private names of autograd."""
