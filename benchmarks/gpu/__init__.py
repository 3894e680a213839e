"""One command that fills a few minutes on a machine with GPUs: `python -m benchmarks.gpu`.

`part.py` says what a part is; most other files are parts. `frame/` runs them.
"""
