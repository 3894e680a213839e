"""What tasks hand on: micro-batches, skips, copies between devices. Also observers, and all private names of PyTorch.
It may import `skip`, and of `schedules` the kinds of tasks."""
