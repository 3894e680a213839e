"""Tensors that tasks pass to each other, copies of tensors, and private functions of autograd."""
