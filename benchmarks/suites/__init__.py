"""Times of single parts of the library, under pytest-benchmark.
They may import `reproduce.models` and `torchgpipe`."""
