"""A command for a few minutes on a machine with GPUs: `python -m benchmarks.gpu`.

The command runs several measurements, called parts. The file `part.py` defines what a part is. Most
other files of this folder are parts. The code in the folder `frame` runs them.
"""
