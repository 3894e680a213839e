"""One command that fills a few minutes on a machine with GPUs: `python -m benchmarks.gpu`.

`part.py` says what a part is. `frame.py` runs the parts, and `page.py` says what they found.
"""
