"""Train for the published epochs and measure accuracy.

It may import `run`, but not `run.engines`, and what `run` may import.
"""
