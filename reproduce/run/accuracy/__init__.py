"""Train models for the published number of epochs and measure their accuracy.

This folder may import `run`, but not `run.engines`, and all folders that `run` may import.
"""
