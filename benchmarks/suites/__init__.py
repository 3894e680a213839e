"""Times of single parts of the library, under pytest-benchmark.
They may import `benchmarks.pipelines`, `reproduce.models` and `torchgpipe`."""
