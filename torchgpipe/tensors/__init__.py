"""What tasks hand on: micro-batches, skips, copies between devices; and all private names of PyTorch."""
