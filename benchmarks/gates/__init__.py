"""Questions about the library's speed, each a program with a record. May import `benchmarks` and `reproduce`."""
