"""The frame of `python -m benchmarks.gpu`: command, processes of parts, and page."""
