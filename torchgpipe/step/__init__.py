"""A training step: the losses of the micro-batches, and the loss of the mini-batch."""
