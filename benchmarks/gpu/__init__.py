"""A command for a few minutes on a machine with GPUs: `python -m benchmarks.gpu`.

The command runs several measurements, called parts. `part.py` defines what a part is. Most other
files here are parts. The code in `frame/` runs them.
"""
