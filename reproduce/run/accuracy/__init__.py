"""Train for the published epochs and measure accuracy: data, epochs, and resuming an interrupted training.
It may import `run`, but not `run.engines`, and what `run` may import."""
