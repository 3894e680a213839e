"""Adapters, which run the same checks with this library and with other pipeline libraries.

The checks are the rows of tests/behaviours/rows/training. Adapters may import `tests.behaviours`,
`tests.plain`, `benchmarks.pipelines`, `reproduce.run.engines` and `torchgpipe`.
"""
