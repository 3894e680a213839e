"""Times of single parts of the library, under pytest-benchmark. May import `benchmarks.pipelines` and `reproduce`."""
