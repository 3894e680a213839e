"""The code of `python -m benchmarks.gpu` that runs its parts and writes a page on the results."""
