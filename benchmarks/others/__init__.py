"""Contain adapters for this library and other pipeline libraries.

An adapter runs the rows of tests/behaviours/rows/training. Adapters may import `tests.behaviours`,
`tests.plain`, `benchmarks.pipelines`, `reproduce.run.engines` and `torchgpipe`.
"""
