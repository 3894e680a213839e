"""Adapters, which run the same checks with this library and with other pipeline libraries.

The folder tests/behaviours/rows/training has the checks. Adapters may import `tests.behaviours`,
`tests.plain`, `benchmarks.pipelines`, `reproduce.run.engines` and `torchgpipe`.
"""
