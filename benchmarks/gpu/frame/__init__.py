"""The frame of `python -m benchmarks.gpu`: its command, the processes of its parts, and its page.
"""
