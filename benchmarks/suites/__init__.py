"""Benchmarks of single functions of the library, measured with pytest-benchmark.

They may import `reproduce.models` and `torchgpipe`.
"""
