"""Train models for the published number of epochs and measure their accuracy.

This folder may import all folders that `run` may import. It may also import `run`, but not
`run.engines`.
"""
