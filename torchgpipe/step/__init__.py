"""The training step of a pipeline: compute the micro-batches' losses, and run their backwards."""
