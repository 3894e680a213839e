"""Train models for the published number of epochs and measure their accuracy.

This folder may import everything that `run` may import, and `run`, but not `run.engines`.
"""
