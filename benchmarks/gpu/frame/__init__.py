"""Run the parts (measurements) of `python -m benchmarks.gpu`, and write a page on their results."""
