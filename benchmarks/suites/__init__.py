"""Times of single parts of the library, measured with pytest-benchmark.

They may import `reproduce.models` and `torchgpipe`.
"""
