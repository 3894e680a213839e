"""Adapters that run the rows of tests/behaviours/rows/training on this library and on others.

They may import `tests.behaviours`, `tests.plain`, `benchmarks.pipelines`, `reproduce.run.engines`
and `torchgpipe`.
"""
