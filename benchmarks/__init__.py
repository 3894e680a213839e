"""Programs that measure the library, or compare it with others. They are development code, and not installed.
They may import `torchgpipe`, `reproduce` and, for rows and comparisons, `tests.behaviours`; tests alone import them."""
