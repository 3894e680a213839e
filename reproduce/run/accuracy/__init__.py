"""Train to an accuracy: data, epochs, and going on where a run was interrupted.
It may import `run`, but not `run.engines`, and what `run` may import."""
