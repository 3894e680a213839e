"""Adapters: classes that run the same checks with this library and with other pipeline libraries.

A check is a short training, whose result is compared with that of the same layers without a
pipeline. The folder tests/behaviours/rows/training has the checks. Adapters may import
`tests.behaviours`, `tests.plain`, `benchmarks.pipelines`, `reproduce.run.engines` and `torchgpipe`.
"""
